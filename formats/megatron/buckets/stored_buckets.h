// SPDX-License-Identifier: Apache-2.0
//
// StoredBuckets is what the buffers of DistributedOptimizer are in a directory: by optimizer, group
// of ranks, buffer and bucket, with all that the directory says of them.  It does not say which
// parameters lie in them.
//
// Thread safety: immutable once read.
// Lifetime: groups of hyper-parameters refer to the files that it keeps.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "formats/dcp/stored_state.h"
#include "formats/megatron/buckets/bucket_layout.h"
#include "formats/megatron/buckets/value_prints.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kMasterKind = "master";  // stored as param

// One kind of state of all that lies in a bucket.
struct BucketTensor {
  struct Chunk {
    uint64_t begin = 0;
    uint64_t elements = 0;
    dcp::StoredState::DensePlace place;
  };
  DType dtype = DType::kF32;
  std::vector<Chunk> chunks;  // one after the other, from 0 to the end

  // The chunk that holds an element.  REQUIRES: the tensor has it.
  size_t ChunkOf(uint64_t element) const;
  // Elements of it, as they lie.
  FlatTensor Part(const BucketPlace& place) const;
};

struct StoredBucket {
  std::string key;                            // of the masters, for messages
  std::map<std::string, BucketTensor> kinds;  // by our names: "master", "exp_avg"
  BucketShape shape;
};

struct StoredBuffer {
  DType parameters = DType::kF32;
  std::vector<StoredBucket> buckets;
};

// The tensors that one group of ranks divides.
struct RankGroup {
  std::vector<StoredBuffer> buffers;
};

struct BucketOptimizer {
  std::vector<RankGroup> groups;
  std::vector<CommonGroup> hyper_parameters;
  bool experts = false;                                 // its groups are of expert parallelism
  std::vector<std::shared_ptr<const TorchFile>> files;  // that hyper_parameters refer to
};

// The names of the optimizers that have buckets: "chained_1.", "" of the only one.
std::vector<std::string> BucketOptimizersOf(const dcp::DcpMetadata& metadata);

// kInvalid and kUnsupported name what contradicts what, or is not known; other errors are those of
// reading.  BLOCKS: on reading objects.
Result<BucketOptimizer> ReadBuckets(dcp::StoredState& state, const std::string& chain);

}  // namespace ckptfs::megatron
