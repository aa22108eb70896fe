// SPDX-License-Identifier: Apache-2.0

#include "core/view/layout_survey.h"

#include <algorithm>

#include "core/base/parallel.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

void Add(LayoutSurvey::Format& format, const LayoutOffer::Answer& answer, const std::string& layout) {
  if (!answer.refusal) {
    format.shown.push_back(layout);
    return;
  }
  const std::string& reason = answer.refusal->message;
  const auto same = std::ranges::find(format.refused, reason, [](const auto& one) { return one.first; });
  if (same != format.refused.end()) {
    same->second.push_back(layout);
  } else {
    format.refused.push_back({reason, {layout}});
  }
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += StrCat(text.empty() ? "" : ", ", word);
  return text;
}

// Where a reason is given: the layouts by the formats that refuse them.
using Places = std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>>;

void AddPlace(Places& places, const LayoutOffer::Cause& cause) {
  for (auto& [formats, layouts] : places) {
    if (formats != cause.formats) continue;
    layouts.push_back(cause.error.layout);
    return;
  }
  places.push_back({cause.formats, {cause.error.layout}});
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

std::vector<std::string> LayoutSurvey::CauseLines() const {
  std::vector<std::pair<std::string, Places>> causes;
  for (const auto& offer : offers) {
    for (const LayoutOffer::Cause& cause : offer->Causes()) {
      auto same = std::ranges::find(causes, cause.error.message, [](const auto& one) { return one.first; });
      if (same == causes.end()) same = causes.insert(same, {cause.error.message, {}});
      AddPlace(same->second, cause);
    }
  }
  std::vector<std::string> lines;
  for (const auto& [reason, places] : causes) {
    std::string where;
    for (const auto& [who, which] : places) {
      const bool all = which.size() == offers.size();
      where += StrCat(where.empty() ? "" : "; ", all ? "any layout" : Joined(which), " (", Joined(who), ")");
    }
    lines.push_back(StrCat(where, ": ", reason));
  }
  return lines;
}

}  // namespace ckptfs
