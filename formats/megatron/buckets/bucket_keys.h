// SPDX-License-Identifier: Apache-2.0
//
// The keys under which DistributedOptimizer of megatron-core saves its buffers as they are
// (dp_reshardable; optimizer/distrib_optimizer.py of core 0.16.1):
//
//   [chained_<N>.]optimizer.distributed.dp_group_idx_<G>.
//     gbuf_idx_<B>.dtype_(torch.<parameters'>, torch.<gradients'>).bucket_idx_<K>.<kind>
//                           elements of a bucket; the master's kind is param
//     optimizer             an object: hyper-parameters of the groups, with step
//     per_bucket_numel      an object: by buffer {dtypes: elements of each bucket with all padding}
//     per_bucket_numel_unpadded
//                           the same without the padding at a bucket's end
//
// Thread safety: pure functions.
// Lifetime: results refer to the key.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/tensor/dtype.h"

namespace ckptfs::megatron {

struct BucketKey {
  std::string_view chain;  // "chained_1."; "" of the only optimizer
  uint32_t group = 0;      // the ranks that divide a buffer among them
  uint32_t buffer = 0;
  DType parameters = DType::kF32;  // of what lies in the buffer
  uint32_t bucket = 0;
  std::string_view kind;  // "exp_avg"
};
// Nothing for another key, and for one with a number of more than nine digits.
std::optional<BucketKey> BucketKeyOf(std::string_view key);

struct GroupObjectKey {
  std::string_view chain;
  uint32_t group = 0;
  std::string_view what;  // "per_bucket_numel"
};
// `name`: without the place of the object's part.
std::optional<GroupObjectKey> GroupObjectKeyOf(std::string_view name);

}  // namespace ckptfs::megatron
