// SPDX-License-Identifier: Apache-2.0

#include "snapshot/device/cuda_image.h"

// CKPTFS_CUDA_IMAGE: the file that nvcc made (CMakeLists.txt).
asm(".section .rodata\n"
    ".balign 64\n"
    "ckptfs_cuda_image:\n"
    ".incbin \"" CKPTFS_CUDA_IMAGE
    "\"\n"
    "ckptfs_cuda_image_end:\n"
    ".byte 0\n"
    ".previous\n");

extern "C" const std::byte ckptfs_cuda_image[] __attribute__((visibility("hidden")));
extern "C" const std::byte ckptfs_cuda_image_end[] __attribute__((visibility("hidden")));

namespace ckptfs {

std::span<const std::byte> CudaImage() { return {ckptfs_cuda_image, ckptfs_cuda_image_end}; }

}  // namespace ckptfs
