// SPDX-License-Identifier: Apache-2.0
//
// `.metadata` of DCP: every box lies inside its tensor, every chunk has its words, and
// every place names a file of the list.

#include <string_view>

#include "core/base/checked_math.h"
#include "core/io/memory_root.h"
#include "formats/dcp/metadata.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ckptfs::MemoryRoot root("memory");
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  FUZZ_CHECK(root.PublishIfAbsent("m", bytes).has_value());
  const auto file = root.Open("m");
  FUZZ_CHECK(file.has_value());
  const auto read = ckptfs::dcp::ReadMetadata(**file);
  if (!read) return 0;
  for (const auto& tensor : read->tensors) {
    FUZZ_CHECK(ckptfs::RangeInside(tensor.first_chunk, tensor.chunk_count, read->chunks.size()));
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      const auto offsets = read->OffsetsOf(tensor, i);
      const auto sizes = read->SizesOf(tensor, i);
      bool empty = false;
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        FUZZ_CHECK(ckptfs::RangeInside(offsets[d], sizes[d], tensor.shape[d]));
        empty |= sizes[d] == 0;
      }
      FUZZ_CHECK(empty || read->chunks[tensor.first_chunk + i].file < read->files.size());
    }
  }
  for (const auto& object : read->objects) FUZZ_CHECK(object.extent.file < read->files.size());
  FUZZ_CHECK(read->tensor_paths.size() == read->tensors.size());
  FUZZ_CHECK(read->object_paths.size() == read->objects.size());
  return 0;
}
