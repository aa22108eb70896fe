// SPDX-License-Identifier: Apache-2.0
//
// Settle decides what the values of a StateDict mean, once for all sources: how its ranks' parts
// make up each tensor and which rule cuts it (tensor_shardings.h), whether it is trained, frozen or
// a buffer (core/state/roles.h), whose each state is (core/state/ownership.h) and whether it fits
// (core/state/state_fit.h), ties, groups, weights that are casts of their masters, and the model's
// dtype.  What is not proved or does not
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
  size_t derived = 0;                           // weights that are their masters, cast
};

// Puts all of it into the assembler.  The parameter of a tensor has the tensor's number.
// REQUIRES: the assembler has no parameters; its header has the degrees of a source with ranks.
// Errors: kInvalid names the tensor or state that contradicts another; those of the functions.
Result<Settled> Settle(const StateDict& dict, const SourceOptions& options, Assembler& assembler);

// Fills an atom with a tensor that one file has whole.  It must outlive the function.
PlaceParts PlaceHeld(const FileTensor::Held& held);
// Adds all of what one rank holds of an atom.  It must outlive the function, whose error kInvalid
// names file, parameter and kind where the tensor's shape is not that of the rank's part.
PlaceParts PlaceTensor(const FileTensor& tensor, Holder holder = {});

// The dtype that is counted most, `otherwise` if none is.
std::optional<DType> MostCommon(const std::map<DType, uint64_t>& counts,
                                std::optional<DType> otherwise);

}  // namespace ckptfs
