// SPDX-License-Identifier: Apache-2.0
//
// UniversalFormat shows a step as a DeepSpeed universal checkpoint directory that
// an unmodified engine (0.19.7, checkpoint.load_universal) loads at any ZeRO
// stage and degree: view/<layout>/deepspeed/.
//
//   deepspeed/latest, deepspeed/latest_universal     the tag, without a newline
//   deepspeed/<tag>/mp_rank_XX_model_states.pt       tp * pp of them
//   deepspeed/<tag>/zero_pp_rank_0_mp_rank_XX_model_states.pt   the same, for stage 3
//   deepspeed/<tag>/zero/optimizer_state.pt
//   deepspeed/<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,<state>,step}.pt
//   deepspeed/<tag>/zero/<alias>                     symlink to its parameter
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string_view>

#include "core/view/view_format.h"

namespace ckptfs::deepspeed {

class UniversalFormat : public ViewFormat {
 public:
  std::string_view name() const override { return "deepspeed"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;
};

}  // namespace ckptfs::deepspeed
