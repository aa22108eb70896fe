// SPDX-License-Identifier: Apache-2.0
//
// UniversalView shows a step as a DeepSpeed universal checkpoint directory that
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
// Lifetime: `families` (may be null: the shipped ones) must outlive the view.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/family.h"
#include "core/view/shown_names.h"
#include "core/view/view_cache.h"
#include "core/view/view_format.h"
#include "formats/deepspeed/universal/universal_index.h"

namespace ckptfs::deepspeed {

class UniversalView : public ViewFormat {
 public:
  explicit UniversalView(const FamilySet* families = nullptr) : families_(families) {}

  std::string_view name() const override { return "deepspeed"; }
  Status Supports(const StepModel& step, const Layout& layout) const override;
  Result<std::vector<ViewEntry>> List(const StepModel& step, const Layout& layout,
                                      std::string_view directory) const override;
  Result<ViewEntry> Find(const StepModel& step, const Layout& layout,
                         std::string_view path) const override;
  Result<Plan> MakePlan(const StepModel& step, const Layout& layout,
                        std::string_view file) const override;

 private:
  // What one layout's directory holds, and the sizes of the files that are not
  // per parameter.
  struct Prepared {
    UniversalIndex index;
    ShownNames names;
    std::map<uint32_t, uint64_t> model_sizes;  // by source rank
    uint64_t optimizer_size = 0;
  };
  using PreparedPtr = std::shared_ptr<const Prepared>;

  Result<PreparedPtr> Prepare(const StepModel& step, const Layout& layout) const;
  Result<PreparedPtr> Build(const StepModel& step, const Layout& layout) const;
  Result<ViewEntry> EntryOf(const StepModel& step, const Prepared& prepared,
                            std::string_view path) const;
  std::vector<std::string> NamesIn(const Prepared& prepared, std::string_view directory) const;

  const FamilySet* families_;
  mutable ViewCache<Prepared> cache_;
};

}  // namespace ckptfs::deepspeed
