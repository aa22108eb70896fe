// SPDX-License-Identifier: Apache-2.0
//
// MemberOwners says which tensors the members of an optimizer's groups are (core/state/ownership.h)
// and tells what is left out: an optimizer whose members nothing proves, a member whose name the
// model does not have.  Nothing else is left out with them.
//
// Thread safety: pure but for the header.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "core/state/source.h"
#include "formats/settle/settle.h"

namespace ckptfs {

struct MemberOwners {
  std::vector<std::optional<Settled::Numbers>> numbers;  // as Settled has them
  std::vector<std::vector<size_t>> groups;  // of the dict: tensors, in the members' order
};

// Errors are those of the dict's functions.
Result<MemberOwners> OwnersOfMembers(const StateDict& dict, const SourceOptions& options,
                                     StepModel& header);

}  // namespace ckptfs
