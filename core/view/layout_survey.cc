// SPDX-License-Identifier: Apache-2.0

#include "core/view/layout_survey.h"

#include <algorithm>

#include "core/base/parallel.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

void Add(LayoutSurvey::Format& format, const LayoutOffer::Answer& answer,
         const std::string& layout) {
  if (!answer.refusal) {
    format.shown.push_back(layout);
    return;
  }
  const std::string& reason = answer.refusal->message;
  const auto same =
      std::ranges::find(format.refused, reason, [](const auto& one) { return one.first; });
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

// Texts, each once, with where they are said: layouts by the formats that say it of them.
class SaidOf {
 public:
  void Add(const std::string& text, const std::vector<std::string>& formats,
           const std::string& layout) {
    auto said = std::ranges::find(texts_, text, [](const auto& one) { return one.first; });
    if (said == texts_.end()) said = texts_.insert(said, {text, {}});
    for (auto& [who, which] : said->second) {
      if (who != formats) continue;
      which.push_back(layout);
      return;
    }
    said->second.push_back({formats, {layout}});
  }

  // "tp8, pp3 (rank, deepspeed); cp2 (dcp): text"; "any layout" where as many as `all` says of
  // the formats were named.
  template <typename All>
  std::vector<std::string> Lines(All all) const {
    std::vector<std::string> lines;
    for (const auto& [text, places] : texts_) {
      std::string where;
      for (const auto& [who, which] : places) {
        where +=
            StrCat(where.empty() ? "" : "; ",
                   which.size() == all(who) ? "any layout" : Joined(which), " (", Joined(who), ")");
      }
      lines.push_back(StrCat(where, ": ", text));
    }
    return lines;
  }

 private:
  using Places = std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>>;
  std::vector<std::pair<std::string, Places>> texts_;
};

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
  for (const auto& format : formats)
    survey.formats.push_back({std::string(format->name()), {}, {}});
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
  SaidOf causes;
  for (const auto& offer : offers) {
    for (const LayoutOffer::Cause& cause : offer->Causes()) {
      causes.Add(cause.error.message, cause.formats, offer->name);
    }
  }
  return causes.Lines([&](const auto&) { return offers.size(); });
}

std::vector<std::string> LayoutSurvey::LeftOutLines() const {
  SaidOf left_out;
  for (const auto& offer : offers) {
    for (const LayoutOffer::Answer& answer : offer->answers) {
      for (const std::string& line : answer.left_out)
        left_out.Add(line, {answer.format}, offer->name);
    }
  }
  return left_out.Lines([&](const std::vector<std::string>& of) {
    const auto format = std::ranges::find(formats, of.front(), &Format::name);
    return format == formats.end() ? 0 : format->shown.size();
  });
}

}  // namespace ckptfs
