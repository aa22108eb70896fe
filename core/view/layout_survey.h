// SPDX-License-Identifier: Apache-2.0
//
// A LayoutSurvey tries the layouts that a user is likely to ask for, so that a step can say what
// works and what the others need before anybody asks.
//
// Thread safety: pure functions over immutable values.

#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/model/layout.h"
#include "core/view/view_set.h"

namespace ckptfs {

// Those that stand for the degrees a user may ask for, the step's own first, each once.
std::vector<Layout> UsualLayouts(const Layout& own);

struct LayoutSurvey {
  // The layouts that one format shows, and why it does not show the others.
  struct Format {
    std::string name;
    std::vector<std::string> shown;
    std::vector<std::pair<std::string, std::vector<std::string>>> refused;  // a reason once
  };
  std::vector<Format> formats;
  std::vector<std::shared_ptr<const LayoutOffer>> offers;  // as UsualLayouts

  // A line a reason: "tp8, pp3 (rank, deepspeed); cp2 (dcp): reason", or "any layout (rank): ...".
  std::vector<std::string> CauseLines() const;
  // Likewise of what views leave out: "tp1, tp2 (deepspeed): 'lr' of ...".
  std::vector<std::string> LeftOutLines() const;
};

// BLOCKS: on opening the views of some twenty layouts, in parallel.
LayoutSurvey SurveyLayouts(const std::shared_ptr<const StepModel>& step,
                           std::span<const std::unique_ptr<ViewFormat>> formats);

}  // namespace ckptfs
