// SPDX-License-Identifier: Apache-2.0
//
// ForEachRivalOrder lists the orders in which a script may give a model's parameters to an
// optimizer of its own, where a tool would give them in the model's order: all reversed, sorted by
// name, and with a module before or after its siblings (the head first), or all of them reversed.
// A rule of a tool proves an order only where the shapes of the states fit none of these.
//
// Numbered siblings (layers.0, layers.1) keep their order: each has the shapes of the next, so no
// shape could tell two of them apart.  So do modules without a matrix: a norm has the shape of
// every other one.
//
// Thread safety: pure.

#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "core/state/ownership.h"

namespace ckptfs {

// `parameters`: in the model's order.  Calls `rival` with each order (a permutation of their
// indices), until it returns true.  Returns false if there are too many to look at.
bool ForEachRivalOrder(std::span<const OwnableParameter> parameters,
                       const std::function<bool(const std::vector<size_t>&)>& rival);

}  // namespace ckptfs
