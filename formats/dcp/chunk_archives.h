// SPDX-License-Identifier: Apache-2.0
//
// LocateChunks finds where the elements of DCP chunks lie.  A chunk is a whole
// torch.save archive at an extent of a file, and says itself of which dtype, shape and
// strides it is; that must be what `.metadata` says.
//
// Archives of equal tensors are equal up to checksums, so few of them are parsed: an
// archive all of whose bytes around the elements equal those of one that was, but for
// the checksums of the elements and the serialization id, which no reader looks at, says
// the same.  Any other is parsed by itself.
//
// Thread safety: may be called concurrently.
// Units: offsets and lengths are bytes, sizes elements.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/io/file.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"
#include "formats/torch/file_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {

struct ChunkAsked {
  uint64_t offset = 0;  // of the archive
  uint64_t length = 0;
  DType dtype = DType::kF32;
  std::span<const uint64_t> sizes;
};

struct ChunksFound {
  // In the order asked: byte of the file where the first element is, if they lie
  // there row-major and without gaps.
  std::vector<uint64_t> dense;
  // Those that do not, by their place in what was asked, rising.
  std::vector<std::pair<size_t, FileTensor>> strided;
  // Those whose archive does not hold a plain tensor, and what it holds, rising: a subclass saves
  // its parts (torchao's 8-bit and 4-bit moments), though `.metadata` says what it stands for.
  std::vector<std::pair<size_t, std::string>> others;
  uint64_t parsed = 0;  // archives, for tests
};

// kInvalid names the file, the offset and the rule: an archive that is not one, or a plain tensor
// that contradicts what is asked.  BLOCKS: on reading.
Result<ChunksFound> LocateChunks(const std::shared_ptr<const File>& file, BlobIndex blob,
                                 std::span<const ChunkAsked> asked);

// The archive at an extent.
Result<TorchFile> OpenArchive(const std::shared_ptr<const File>& file, uint64_t offset,
                              uint64_t length);

}  // namespace ckptfs::dcp
