// SPDX-License-Identifier: Apache-2.0
//
// Settle decides what the values of a StateDict mean, once for all sources that have whole
// tensors: the rule that cuts each tensor (formats/sharding), whether it is trained, frozen or a
// buffer (core/state/roles.h), whose each state is (core/state/ownership.h) and whether it fits
// (core/state/state_fit.h), ties, groups, and the model's dtype.  What is not proved or does not
// fit is left out alone, by its name and the reason.
//
// Thread safety: none; one thread builds one step.
// Lifetime: the dict's functions must be valid while it runs.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/torch/file_tensor.h"

namespace ckptfs {

// The parts of the decision that a format spells in documents of its own.
struct Settled {
  // The tensors that an optimizer trains, by its numbers of them; nothing of a member whose name
  // the model does not have.
  using Numbers = std::map<int64_t, std::optional<size_t>>;
  std::vector<std::optional<Numbers>> numbers;  // by optimizer; nothing: it is left out
  std::optional<uint64_t> steps;                // the greatest `step` of a state
};

// Puts all of it into the assembler.  The parameter of a tensor has the tensor's number.
// REQUIRES: the assembler has no parameters.
// Errors: kInvalid names the tensor or state that contradicts another; those of the functions.
Result<Settled> Settle(const StateDict& dict, const SourceOptions& options, Assembler& assembler);

// Fills an atom with a tensor that one file has whole.  It must outlive the function.
PlaceParts PlaceHeld(const FileTensor::Held& held);
PlaceParts PlaceTensor(const FileTensor& tensor);

}  // namespace ckptfs
