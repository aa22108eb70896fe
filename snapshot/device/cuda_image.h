// SPDX-License-Identifier: Apache-2.0
//
// The kernels of cuda_kernels.cu as CUDA's driver loads them.  Built without nvcc there are none
// (no_cuda_image.cc): copies out of devices go on as ever, and nothing proves them.
//
// Thread safety: constant.

#pragma once

#include <cstddef>
#include <span>

namespace ckptfs {

// A fatbin; empty: none.
std::span<const std::byte> CudaImage();

}  // namespace ckptfs
