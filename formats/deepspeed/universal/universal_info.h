// SPDX-License-Identifier: Apache-2.0
//
// UniversalInfo renders universal_checkpoint_info, the pattern lists by which
// DeepSpeed's tools know how parameters are spread (checkpoint/constants.py of
// 0.19.7), from the step's own patterns for one layout.  The engine hands it
// back as client state, so that the next save can pass it on.
//
// Thread safety: pure function.

#pragma once

#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::deepspeed {

// The dict.  Keys of `source` (may be null) that are not pattern lists of ours
// are kept as they are.
Result<NodeId> UniversalInfo(const ShownState& shown, const Document* source,
                             ArchiveBuilder& archive);

// A regular expression that matches exactly `name`; with `any_number`, numbers
// that are whole components match any number.
std::string PatternOfName(std::string_view name, bool any_number);

}  // namespace ckptfs::deepspeed
