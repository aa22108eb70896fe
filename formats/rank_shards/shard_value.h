// SPDX-License-Identifier: Apache-2.0
//
// ShardValue is what one rank's torch file says of one tensor: the whole tensor's shape, and the
// boxes of it that the rank holds, by where their bytes lie.  Forms:
//
//   DTensor         FSDP2, tensor parallelism, FSDP1 with a device mesh: mesh and placements
//   ShardedTensor   FSDP1 without a mesh: the boxes themselves (shard_offsets, shard_sizes)
//   a plain tensor  a buffer, or whatever one rank has whole
//
// The pickle's classes are read as data (torch.save of torch 2.13: _rebuild_from_type_v2 over
// _rebuild_wrapper_subclass with the attributes as state); nothing is executed.
//
// Thread safety: values; pure but for reading a mesh.
// Units: elements.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "formats/rank_shards/device_mesh.h"
#include "formats/rank_shards/placements.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::rank_shards {

struct ShardValue {
  enum class Form : uint8_t { kPlain, kMesh, kBoxes };
  struct Part {
    std::vector<uint64_t> begin;
    FileTensor tensor;
  };
  Form form = Form::kPlain;
  DType dtype = DType::kF32;
  Shape whole;
  std::vector<Part> parts;  // one, of kBoxes any number
  PlacedMesh at = {};       // of kMesh
  std::vector<Placement> placements = {};
};

// Reads the values of one rank's file.
class ShardReader {
 public:
  // The file and its tree must outlive the reader.
  ShardReader(const TorchFile& file, BlobIndex blob, uint64_t rank)
      : file_(file), blob_(blob), rank_(rank) {}

  // Nothing if it is not a tensor.  kInvalid names the rule that a tensor breaks.
  // BLOCKS: on reading a mesh.
  Result<std::optional<ShardValue>> Read(PickleRef value);

 private:
  Result<ShardValue> ReadDTensor(PickleRef size, PickleRef state);
  Result<ShardValue> ReadShardedTensor(PickleRef size, PickleRef state);

  const TorchFile& file_;
  const BlobIndex blob_;
  const uint64_t rank_;
  std::map<NodeId, PlacedMesh> meshes_;  // of the tree
};

}  // namespace ckptfs::rank_shards
