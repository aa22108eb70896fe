// SPDX-License-Identifier: Apache-2.0
//
// DcpMetadata is what a `.metadata` file of torch.distributed.checkpoint says, checked in
// itself: which tensors and objects a checkpoint has, of which chunks a tensor is made, and
// at which bytes of which file each lies.  Source: torch/distributed/checkpoint/metadata.py
// and filesystem.py of torch 2.13.
//
//   Metadata{ state_dict_metadata: { fqn: TensorStorageMetadata | BytesStorageMetadata },
//             planner_data: { fqn: path } | None,
//             storage_data: { MetadataIndex: _StorageInfo } }
//   TensorStorageMetadata{ properties, size, chunks: [ ChunkStorageMetadata{ offsets, sizes } ] }
//   MetadataIndex{ fqn [, offset] [, index] }      _StorageInfo{ relative_path, offset, length }
//
// A chunk costs about 60 bytes, so that millions of them fit.  Lists of chunks and paths that
// the pickle mentions more than once are copied each time, and bounded by what a file can need. The
// proof that chunks cover a tensor is elsewhere (core/state/assembler.h).
//
// Thread safety: immutable once read.
// Units: boxes are elements, offsets and lengths bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/file.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs::dcp {

// Larger files are refused: about ten million chunks.
inline constexpr uint64_t kMaxMetadataBytes = uint64_t{2} << 30;

// Longer paths of planner_data are not a state dict's, and are refused.
inline constexpr size_t kMaxPathElements = 1024;
inline constexpr size_t kMaxPathText = size_t{16} << 10;  // bytes

// Bytes [offset, offset + length) of files[file].
struct StoredExtent {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  // Its chunks are [first_chunk, first_chunk + chunk_count) of all.
  size_t first_chunk = 0;
  size_t chunk_count = 0;
  size_t first_word = 0;  // of DcpMetadata::boxes
};

struct ObjectEntry {
  std::string name;
  StoredExtent extent;
};

// An element of the path that a flattened name was made of: a key of a dict, or a
// place in a list.
struct PathElement {
  std::string text;
  bool index = false;
  bool operator==(const PathElement&) const = default;
};

struct DcpMetadata {
  std::vector<std::string> files;    // relative_path, each once
  std::vector<TensorEntry> tensors;  // in the file's order
  std::vector<ObjectEntry> objects;
  std::vector<StoredExtent> chunks;
  std::vector<uint64_t> boxes;  // of each chunk its offsets, then its sizes
  // By the place in tensors, then objects; empty where the planner left none.
  std::vector<std::vector<PathElement>> tensor_paths;
  std::vector<std::vector<PathElement>> object_paths;
  bool has_paths = false;
  uint64_t dropped_objects = 0;  // of merged parts: those under another's name
  bool megatron = false;         // of megatron-core's dist_checkpointing, whose keys are others
  std::vector<bool> plain;       // by file: an extent is the elements themselves, not an archive

  bool IsPlain(uint32_t file) const { return file < plain.size() && plain[file]; }

  std::span<const uint64_t> OffsetsOf(const TensorEntry& tensor, size_t chunk) const {
    return BoxOf(tensor, chunk).first(tensor.shape.size());
  }
  std::span<const uint64_t> SizesOf(const TensorEntry& tensor, size_t chunk) const {
    return BoxOf(tensor, chunk).last(tensor.shape.size());
  }

 private:
  // `chunk` counts within the tensor.
  std::span<const uint64_t> BoxOf(const TensorEntry& tensor, size_t chunk) const {
    const size_t words = 2 * tensor.shape.size();
    return std::span(boxes).subspan(tensor.first_word + chunk * words, words);
  }
};

// kInvalid names the rule, kUnsupported what is understood and not read (transforms such
// as zstd, sparse layouts).  BLOCKS: on reading the file, a
// window at a time.
Result<DcpMetadata> ReadMetadata(const File& file);

// One metadata of several: of the directories of one step, whose keys differ, or of ranks
// that each wrote their own, of which a tensor has the chunks of all.  An object is the
// first's.  kInvalid names a tensor of which two say different things.
Result<DcpMetadata> MergeMetadata(std::vector<DcpMetadata> parts);

}  // namespace ckptfs::dcp
