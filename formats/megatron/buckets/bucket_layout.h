// SPDX-License-Identifier: Apache-2.0
//
// BucketLayout finds where parameters begin and end in a bucket of DistributedOptimizer, which
// does not say it.  What is known of a bucket (distributed/param_and_grad_buffer.py, core 0.16.1):
//
//   - the first parameter begins at 0, each other at the next multiple of 64 after the one before
//   - the last one ends where the bucket ends, or less than 64 elements before that
//   - R ranks have equal shares of the bucket, padded to `padded` elements
//   - each rank saves every parameter and every padding of its share as a chunk of its own, so
//     chunks begin and end at the parameters' borders and the shares', and nowhere else
//   - a parameter has the size of one that the model has, and its values (the caller's part)
//
// bucket_order.h decides which parameter has a size and values.
//
// Thread safety: pure functions; values.
// Units: elements; begins are of the bucket.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/result.h"

namespace ckptfs::megatron {

inline constexpr uint64_t kParameterAlignment = 64;

struct BucketShape {
  uint64_t elements = 0;          // that are stored
  uint64_t padded = 0;            // with the padding at its end
  std::vector<uint64_t> borders;  // of chunks: ascending, each once, from 0 to `elements`
};

// A place where a parameter may lie.
struct BucketPlace {
  uint64_t begin = 0;
  uint64_t elements = 0;
  bool operator==(const BucketPlace&) const = default;
};

// The places that are as long as a parameter and have borders at both ends, in the order of where
// they begin.  `sizes`: ascending, each once.  kInvalid for a bucket of which nobody could tell
// the places in reasonable time: it has very many, or more than a few begin at one element.
Result<std::vector<BucketPlace>> PlacesOf(const BucketShape& bucket,
                                          std::span<const uint64_t> sizes);

// The places that together make up the bucket, of those that hold the values of a parameter.
// `fitting`: in the order of where they begin.  `ranks`: that had the bucket's shares; nothing if
// nobody knows.  kInvalid says at which element there is no way, or are several.
Result<std::vector<BucketPlace>> LieOf(const BucketShape& bucket,
                                       std::span<const BucketPlace> fitting,
                                       std::optional<uint64_t> ranks);

}  // namespace ckptfs::megatron
