// SPDX-License-Identifier: Apache-2.0
//
// ShardingsOf decides how the ranks' parts make up each tensor of a StateDict, and how it is cut
// for other degrees: by the rules (formats/sharding), then by what the format says where no rule
// does, and by the stages of its pipeline.
//
// Thread safety: pure but for the header.

#pragma once

#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/sharding/sharding.h"

namespace ckptfs {

// `roles`: of the tensors.  The header, whose layout is the source's, gets the family, the layers
// and the notes.
// Errors: kUnsupported names the tensors that nothing covers, and the remedies; kInvalid one
// whose shapes contradict its rule.
Result<std::vector<Sharding>> ShardingsOf(const StateDict& dict, std::span<const Role> roles,
                                          const SourceOptions& options, StepModel& header);

}  // namespace ckptfs
