// SPDX-License-Identifier: Apache-2.0
//
// Whole torch.save files, zip and legacy: every tensor of what opens lies
// inside the file.

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "core/tensor/piece.h"
#include "formats/torch/torch_file.h"
#include "tests/fuzz/target.h"
#include "tests/support/open_torch_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("fuzz", MFD_CLOEXEC);
  FUZZ_CHECK(file >= 0);
  FUZZ_CHECK(write(file, data, size) == static_cast<ssize_t>(size));
  const auto opened = ckptfs::OpenTorchFile("/proc/self/fd/" + std::to_string(file));
  if (opened) {
    for (const ckptfs::TensorNode& tensor : opened->tree().tensors) {
      const auto place = opened->Locate(tensor, ckptfs::BlobIndex{});
      if (!place) continue;
      const auto fragment = place->As(ckptfs::WholeTensor(tensor.shape));
      FUZZ_CHECK(fragment.has_value());
      const uint64_t length = (fragment->fragment.flat_end - fragment->fragment.flat_begin) *
                              ckptfs::ByteWidth(tensor.dtype);
      FUZZ_CHECK(fragment->fragment.offset <= size && length <= size - fragment->fragment.offset);
      FUZZ_CHECK(ckptfs::ValidateLocal(fragment->local, tensor.shape).has_value());
      FUZZ_CHECK(place->Stored().offset <= size);
    }
  }
  close(file);
  return 0;
}
