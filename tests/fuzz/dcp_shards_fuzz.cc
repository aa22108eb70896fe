// SPDX-License-Identifier: Apache-2.0
//
// Shards of DCP's safetensors writer, whose headers say where each tensor begins in the
// whole: every box lies inside its tensor, and every extent inside its file.  An input is
// two files, the length of the first before it as 4 bytes; or one.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/checked_math.h"
#include "core/io/memory_root.h"
#include "formats/dcp/safetensors_shards.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  uint32_t first = 0;
  std::memcpy(&first, data, sizeof(first));
  std::span bytes(reinterpret_cast<const std::byte*>(data) + 4, size - 4);
  const size_t cut = std::min<size_t>(first, bytes.size());
  ckptfs::MemoryRoot root("memory");
  std::vector<std::string> files = {"a.safetensors"};
  std::vector<size_t> sizes = {cut};
  FUZZ_CHECK(root.PublishIfAbsent(files[0], bytes.first(cut)).has_value());
  if (cut < bytes.size()) {
    files.push_back("b.safetensors");
    sizes.push_back(bytes.size() - cut);
    FUZZ_CHECK(root.PublishIfAbsent(files[1], bytes.subspan(cut)).has_value());
  }
  (void)ckptfs::dcp::IsShard(root, files[0]);
  const auto read = ckptfs::dcp::ReadShards(root, "", files, false);
  if (!read) return 0;
  for (const auto& tensor : read->tensors) {
    FUZZ_CHECK(ckptfs::RangeInside(tensor.first_chunk, tensor.chunk_count, read->chunks.size()));
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      const auto offsets = read->OffsetsOf(tensor, i);
      const auto lengths = read->SizesOf(tensor, i);
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        FUZZ_CHECK(ckptfs::RangeInside(offsets[d], lengths[d], tensor.shape[d]));
      }
      const auto& extent = read->chunks[tensor.first_chunk + i];
      FUZZ_CHECK(extent.file < files.size());
      FUZZ_CHECK(ckptfs::RangeInside(extent.offset, extent.length, sizes[extent.file]));
    }
  }
  FUZZ_CHECK(read->tensor_paths.size() == read->tensors.size());
  return 0;
}
