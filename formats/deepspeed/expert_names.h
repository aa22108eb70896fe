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

namespace ckptfs::deepspeed {

// The expert number in a name; nothing if it is no expert's.
std::optional<uint32_t> ExpertOf(std::string_view name);

// The experts that one rank's group of names holds, per MoE layer.
class LocalExperts {
 public:
  explicit LocalExperts(std::span<const std::string> local_names);
  // kInvalid if the name is no expert's.
  Result<std::string> Global(std::string_view local_name, uint32_t expert_rank) const;

 private:
  std::map<std::string, uint32_t, std::less<>> counts_;  // by what stands before the number
};

}  // namespace ckptfs::deepspeed
