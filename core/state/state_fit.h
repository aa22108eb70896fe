// SPDX-License-Identifier: Apache-2.0
//
// FitOf says whether an optimizer's state can belong to a parameter, by its kind and both
// shapes, and WholeShapeOf which shape of a parameter a set of states tells.
//
//   whole      the parameter's own shape; most kinds, and those of IsWholeKind unless they are
//   numbers factored   rows and columns of a second moment: the shape without its last dimension or
//              without the one before (transformers.Adafactor), or with 1 there
//              (torch.optim.Adafactor, torch.optim.Muon); the shape with 1 in any dimensions (one
//              value a row)
//   scalar     no dimension, or one element
//
// Other shapes (projections, preconditioners, whole histories) fit nothing: nobody knows how
// they follow the parameter when it is cut.
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/model/step_model.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// Kinds that torch's and transformers' optimizers keep per element of their parameter.
bool IsWholeKind(std::string_view kind);

// Kinds that atoms of every step have (core/model/step_model.h), which no optimizer's state can be
// called.
bool IsOurs(std::string_view kind);
inline constexpr std::string_view kNameOfOurs = "it has a name that ckptfs uses for something else";

// Nothing if the state does not fit.
std::optional<Relation> FitOf(std::string_view kind, const Shape& state, const Shape& parameter);

// The dimension of the parameter that each dimension of a state runs along; a dimension of 1 that
// stands for a longer one counts as that.  Rows and columns are told by their names where both have
// one shape.  Nothing if that does not tell, or the state does not fit.
std::optional<std::vector<uint32_t>> DimensionsOf(std::string_view kind, const Shape& state,
                                                  const Shape& parameter);

// The shape of the parameter that these states are of: the whole kinds' one shape, else what
// an Adafactor's rows and columns give together.  Nothing where they do not tell it, or
// contradict each other.
std::optional<Shape> WholeShapeOf(
    std::span<const std::pair<std::string_view, const Shape*>> states);

}  // namespace ckptfs
