// SPDX-License-Identifier: Apache-2.0
//
// Names of native DeepSpeed-MoE experts.  In optimizer files every expert-
// parallel rank counts its experts from 0
// ("...deepspeed_moe.experts.deepspeed_experts.0.weight"); in expert files and
// here they have global numbers: rank x local experts + local number.
//
// Thread safety: immutable values.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/model_states.h"

namespace ckptfs::deepspeed {

// Nothing if the name is not an expert's.
std::optional<ExpertNumber> ExpertOf(std::string_view name);

// The experts that one rank holds, per MoE layer.
class LocalExperts {
 public:
  LocalExperts() = default;
  // All groups of the rank: an expert group above some size is split into
  // several, none of which has all of a layer's experts.
  explicit LocalExperts(std::span<const std::vector<NamedShape>> groups);
  // kUnsupported if the name is not an expert's.
  Result<std::string> Global(std::string_view local_name, uint32_t expert_rank) const;

 private:
  std::map<std::string, uint32_t, std::less<>> counts_;  // by what stands before the number
};

}  // namespace ckptfs::deepspeed
