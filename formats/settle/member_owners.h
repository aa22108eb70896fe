// SPDX-License-Identifier: Apache-2.0
//
// MemberOwners says which tensors the members of an optimizer's groups are (core/state/ownership.h)
// and tells what is left out: an optimizer of another module (core/state/trained_module.h), one
// whose members nothing proves, a member whose name the model does not have.  Nothing else is left
// out with them.
//
// Thread safety: pure but for the header.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "core/base/result.h"
#include "core/state/source.h"
#include "formats/settle/settle.h"

namespace ckptfs {

struct MemberOwners {
  std::vector<std::optional<Settled::Numbers>> numbers;  // as Settled has them
  std::vector<std::vector<size_t>> groups;  // of the dict: tensors, in the members' order
  std::set<size_t> of_others;               // optimizers of other modules
};

// Errors are those of the dict's functions.
Result<MemberOwners> OwnersOfMembers(const StateDict& dict, const SourceOptions& options,
                                     StepModel& header);

}  // namespace ckptfs
