// SPDX-License-Identifier: Apache-2.0
//
// NativeFormat shows a step that DeepSpeed saved as the files that an engine (0.19.7) saves and
// loads without load_universal, at another ZeRO stage and other degrees:
// view/<layout>/deepspeed_native/.
//
//   deepspeed_native/latest                                    the tag, without a newline
//   deepspeed_native/<tag>/mp_rank_MM_model_states.pt          of stages 1 and 2, tp of them
//   deepspeed_native/<tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt   of stage 3, dp x tp
//   deepspeed_native/<tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   dp x tp
//
// The layout's dp, tp, stage and dtype must be the engine's; the order of parameters is the
// source's (target_engine.h).  docs/reference/view-formats.md has the rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string_view>

#include "core/view/view_format.h"

namespace ckptfs::deepspeed {

class NativeFormat : public ViewFormat {
 public:
  std::string_view name() const override { return "deepspeed_native"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;
};

}  // namespace ckptfs::deepspeed
