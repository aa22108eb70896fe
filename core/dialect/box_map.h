// SPDX-License-Identifier: Apache-2.0
//
// A BoxMap says that a box of one tensor is a box of another: how a tensor that was saved under one
// name lies in the tensor that another library keeps.  ComposeSource puts an atom together out of
// such boxes.  It composes pieces, so what it makes is an ordinary gather of the same blobs, and
// nothing that reads atoms knows of names:
//
//   piece of a stored atom (box -> affine in a rank's local)  o  BoxMap (box <-> box)
//     = piece of the shown atom, the same local tensor, the same fragments
//
// Thread safety: immutable values; pure functions.
// Lifetime: results own all they hold.
// Units: elements.  Dimensions are outermost first.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/model/atom_source.h"
#include "core/model/step_model.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct BoxMap {
  uint32_t from = 0;                 // which of the sources
  std::vector<uint64_t> from_begin;  // of the box, in the source
  Shape from_extent;                 // of the box, in the source's dimensions
  std::vector<uint64_t> to_begin;    // of the box, in the target
  // By dimension of the target: the source's dimension that it is, or -1 for a dimension of one
  // element (a layer, an expert).  A source's dimension that none is has an extent of one.
  std::vector<int8_t> axis;
  // By dimension of the source: the box takes every so many-th index; empty: every one.  What
  // lies between others in the source is one box of the target.
  std::vector<uint64_t> from_step = {};
  bool operator==(const BoxMap&) const = default;

  uint64_t StepOf(size_t d) const { return from_step.empty() ? 1 : from_step[d]; }
};

// The box inside both shapes, each dimension used once; kInvalid names the rule that is broken.
Status CheckBoxMap(const BoxMap& map, const Shape& from, const Shape& to);

// The extent of the box in the target's dimensions.
Shape TargetExtent(const BoxMap& map);

// From the target to the source: the same box.  `from` is that of the result.
// REQUIRES: CheckBoxMap succeeds, and the map has no steps: those of a target are not one box.
BoxMap Inverse(const BoxMap& map, uint32_t from);

// The source of an atom of shape `to` that consists of the boxes.  The parts of one atom are of one
// kind:
//
//   gathers and replicas   the k-th copies make the k-th; where not all have as many, the first do
//   averages               of as many copies each
//   scaled                 in blocks of one size; the scales stay beside the values
//   inline                 equal values, the target being of the same shape
//   cast                   `master` is the atom that the casts' own atoms make
//
// kUnsupported for parts of different kinds; kInvalid for a map that leaves a shape, and where the
// boxes do not cover the target exactly once (ProveCoverage).
// REQUIRES: the sources are those of a finished step.
Result<AtomSource> ComposeSource(std::span<const Atom* const> sources, std::span<const BoxMap> maps,
                                 const Shape& to, std::optional<AtomIndex> master = std::nullopt);

}  // namespace ckptfs
