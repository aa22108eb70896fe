// SPDX-License-Identifier: Apache-2.0
//
// Whole torch.save files, zip and legacy: every storage of what opens lies
// inside the file.

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "formats/torch/torch_file.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int file = memfd_create("fuzz", MFD_CLOEXEC);
  FUZZ_CHECK(file >= 0);
  FUZZ_CHECK(write(file, data, size) == static_cast<ssize_t>(size));
  const auto opened = ckptfs::TorchFile::Open("/proc/self/fd/" + std::to_string(file));
  if (opened) {
    for (const auto& [key, record] : opened->storages) {
      FUZZ_CHECK(record.offset <= size && record.length <= size - record.offset);
    }
    for (const ckptfs::TensorNode& tensor : opened->tree.tensors) {
      const auto place = opened->LocateElements(tensor);
      FUZZ_CHECK(!place || (place->offset <= size && place->length <= size - place->offset));
    }
  }
  close(file);
  return 0;
}
