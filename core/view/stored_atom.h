// SPDX-License-Identifier: Apache-2.0
//
// StoredAtom follows derived casts from the atom a plan shows to the atom
// whose bytes exist, and remembers every dtype on the way: a view of a bf16
// weight that is derived from an fp32 master rounds to bf16 first, whatever
// dtype is shown.
//
// Thread safety: immutable value.
// Lifetime: refers to the model.

#pragma once

#include <array>
#include <string>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/tensor/conversion.h"

namespace ckptfs {

struct StoredAtom {
  const Atom* atom = nullptr;
  AtomIndex index{};
  std::array<DType, Conversion::kMaxChain> chain{};  // atom's dtype, ..., shown
  size_t chain_length = 0;

  // From elements stored as `stored` (multiplied by `factor`) to shown ones.
  Result<Conversion> MakeConversion(DType stored, double factor) const;
};

// kInvalid for an index out of range or a shape that differs on the way,
// kUnsupported for more than two derivations.
Result<StoredAtom> FindStoredAtom(const StepModel& model, AtomIndex atom, DType shown);

// "name (kind)", for messages.
std::string AtomLabel(const StepModel& model, AtomIndex atom);

}  // namespace ckptfs
