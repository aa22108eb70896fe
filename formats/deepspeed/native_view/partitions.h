// SPDX-License-Identifier: Apache-2.0
//
// Partitions are ZeRO's flat groups as one tensor-parallel rank's engines cut them (zero_layout.h
// has the source's side):
//
//   stages 1, 2   a group's parameters one after the other, zeros up to a multiple of 2 dp
//                 elements, cut into dp partitions of equal length
//   stage 3       parameters of a group until they pass sub_group_size are a sub-group; each is
//                 cut alone, into dp slices of ceil(n / dp) elements, zeros at its end
//
// Thread safety: immutable values; pure functions.
// Lifetime: a partition refers to its group.
// Units: elements of local tensors.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/piece.h"
#include "formats/deepspeed/native_view/target_engine.h"

namespace ckptfs::deepspeed {

struct FlatMember {
  ParameterIndex parameter{};
  std::shared_ptr<const LocalTensor> local;
  uint64_t elements = 0;
};

// A group of stages 1 and 2, a sub-group of stage 3.
struct FlatGroup {
  size_t number = 0;  // of the optimizer's group
  std::vector<FlatMember> members;
};

// [begin, end) of a member, row-major; what is at and beyond its end is zero.
struct FlatSpan {
  const FlatMember* member = nullptr;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The part of a group that one data-parallel rank has.
struct Partition {
  std::vector<FlatSpan> spans;
  uint64_t padding = 0;   // zeros behind them
  uint64_t elements = 0;  // all of it
};

// The groups in their order; of stage 3 sub-groups.
Result<std::vector<FlatGroup>> FlatGroupsOf(const ShownState& shown, const TargetEngine& engine,
                                            const RankCoordinate& at);

Partition PartitionOf(const FlatGroup& group, const TargetEngine& engine, uint32_t dp);

}  // namespace ckptfs::deepspeed
