// SPDX-License-Identifier: Apache-2.0
//
// MatchInOrder gives the parameters of a model to the members of an optimizer's groups where
// every group has its members in the model's order: what a tool does that sorts
// model.named_parameters() into groups.  It counts the ways, level by level, so that nothing
// recurses.
//
// Thread safety: pure.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// A parameter, and the groups that it may be in: bit g for group g.
struct PlacedParameter {
  const Shape* shape = nullptr;
  uint64_t groups = 0;
};

// The group of each parameter, nothing for one that no group has (frozen).  `groups`: the shapes of
// each group's members in order, nothing where none is told.  kUnsupported says that there is
// no way, several, or too many to look at.
Result<std::vector<std::optional<size_t>>> MatchInOrder(
    std::span<const PlacedParameter> parameters,
    std::span<const std::vector<std::optional<Shape>>> groups);

}  // namespace ckptfs
