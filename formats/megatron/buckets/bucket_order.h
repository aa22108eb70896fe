// SPDX-License-Identifier: Apache-2.0
//
// BucketOrder decides whose the places in the buffers of DistributedOptimizer are.  Evidence:
//
//   values   a place holds a master that is, cast, the weight of a parameter of its rank.  Where
//            only one parameter has these values, the place is that one's.
//   layers   a layer lies in one buffer of a rank.  So parameters of layers that are known to lie
//            elsewhere do not count.
//   order    modules of one structure register their parameters in one order: a parameter stands
//            at the same distance from another one of its layer in each layer, on each rank.  So
//            what values decide in one layer is decided in all of them.
//   rest     one parameter without a layer and one place are left that have these values.
//
// All that is decided must obey the order; layers must follow each other without a gap; ranks that
// divide the same tensors must have them in the same order.  Where parameters have the same values
// in every layer (norms at one before the first steps, experts that are copies) none of this tells
// them apart: their masters are equal where they are cast, but their moments may differ.  So
// nothing is decided then.
//
// The time that it takes depends on the number of places and parameters alone.
//
// Thread safety: pure; values.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"

namespace ckptfs::megatron {

// A parameter of a rank, or an expert of it.
struct OrderedParameter {
  uint32_t name = 0;              // without the layer's number
  std::optional<uint32_t> layer;  // ascending in the order of registration
  uint32_t values = 0;  // equal numbers: the rank could not tell them apart by their values
};

// A buffer of a rank.
struct OrderedBuffer {
  uint32_t rank = 0;  // of the ranks below
  uint32_t line = 0;  // buffers of equal lines have the same parameters, cut by their ranks
  std::vector<uint32_t> places;  // the values of each, in the order of registration
};

// By buffer and place: the number of a parameter of the buffer's rank.  `ranks`: the parameters of
// each.  `name_of(rank, parameter)` is for messages.  kInvalid says what is not decided, or which
// evidence contradicts which.
Result<std::vector<std::vector<uint32_t>>> DecideOrder(
    std::span<const std::vector<OrderedParameter>> ranks, std::span<const OrderedBuffer> buffers,
    const std::function<std::string(uint32_t rank, uint32_t parameter)>& name_of);

}  // namespace ckptfs::megatron
