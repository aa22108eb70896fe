// SPDX-License-Identifier: Apache-2.0
//
// Which parameter is which numbered state of an optimizer that knows no names
// (stage 0).  Optimizers number parameters group by group, and within a group
// in the order of the model; the shapes must then leave exactly one way.
//
// Thread safety: pure functions.

#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"

namespace ckptfs::deepspeed {

struct NamedShape;

// `groups`: per group the shapes of its members in order, nothing where the
// optimizer keeps no state that would tell.  Returns the names in the same
// form; parameters left over are frozen.  kUnsupported if there is no way or
// more than one.
Result<std::vector<std::vector<std::string>>> MatchStates(
    std::span<const NamedShape> parameters,
    std::span<const std::vector<std::optional<Shape>>> groups);

}  // namespace ckptfs::deepspeed
