// SPDX-License-Identifier: Apache-2.0

#include "core/view/layout_survey.h"

#include <algorithm>

#include "core/base/parallel.h"
#include "core/base/single_flight.h"

namespace ckptfs {
namespace {

void Add(LayoutSurvey::Format& format, const LayoutOffer::Answer& answer, const std::string& layout) {
  if (answer.refusal.empty()) {
    format.shown.push_back(layout);
    return;
  }
  for (LayoutSurvey::Refused& refused : format.refused) {
    if (refused.reason != answer.refusal) continue;
    refused.layouts.push_back(layout);
    return;
  }
  format.refused.push_back({answer.refusal, answer.code, {layout}});
}

}  // namespace

std::vector<Layout> UsualLayouts(const Layout& own) {
  std::vector<Layout> layouts = {own};
  for (const char* text : {"tp1", "dp2_zero1", "dp3_zero2", "dp8_zero3", "tp2", "tp4", "tp8", "pp2",
                           "pp3", "pp4", "tp2_pp2_dp2_zero1", "dp2_ep2", "cp2", "vpp2_pp2", "bf16",
                           "fp16", "fp32", "plain", "pipe"}) {
    auto layout = Layout::Parse(text);
    if (layout && *layout != own) layouts.push_back(*std::move(layout));
  }
  return layouts;
}

LayoutSurvey SurveyLayouts(const std::shared_ptr<const StepModel>& step,
                           std::span<const std::unique_ptr<ViewFormat>> formats) {
  LayoutSurvey survey;
  for (const auto& format : formats) survey.formats.push_back({std::string(format->name()), {}, {}});
  const std::vector<Layout> layouts = UsualLayouts(step->layout);
  survey.offers.resize(layouts.size());
  ParallelFor(layouts.size(), [&](size_t i) {
    auto offer = Caught([&]() -> Result<std::shared_ptr<const LayoutOffer>> {
      return ViewSet::Open(step, layouts[i], formats)->shared_offer();
    });
    if (offer) survey.offers[i] = *std::move(offer);  // else there was no memory for it
  });
  std::erase(survey.offers, nullptr);
  for (const auto& offer : survey.offers) {
    for (size_t f = 0; f < survey.formats.size(); ++f) {
      Add(survey.formats[f], offer->answers[f], offer->name);
    }
  }
  return survey;
}

}  // namespace ckptfs
