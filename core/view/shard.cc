// SPDX-License-Identifier: Apache-2.0
#include "core/view/shard.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/family.h"

namespace ckptfs {
namespace {

constexpr uint64_t kSensibleWorld = 65'536;
constexpr uint64_t kSensibleGrowth = 16;

template <class... Pieces>
Error Invalid(const Pieces&... pieces) {
  return Error{ErrorCode::kInvalid, StrCat(pieces...)};
}

bool IsExpert(const Parameter& parameter) {
  return parameter.expert.has_value() || parameter.stacked_experts > 0;
}

bool IsTied(const StepModel& step, const Parameter& parameter) {
  const Parameter* first = step.parameters.data();
  const std::less<const Parameter*> before;
  if (!before(&parameter, first) && before(&parameter, first + step.parameters.size())) {
    return step.IsTied(ParameterIndex{static_cast<uint32_t>(&parameter - first)});
  }
  const auto found = step.FindParameter(parameter.name);
  return found && step.IsTied(*found);
}

// "split2-2-1": the most even split, larger stages first.
std::string SuggestSplit(uint64_t layers, uint64_t chunks) {
  constexpr uint64_t kShown = 64;
  if (chunks > kShown) return "split<layers of each stage>";
  std::string token = "split";
  for (uint64_t c = 0; c < chunks; ++c) {
    token += StrCat(c == 0 ? "" : "-", layers / chunks + (c < layers % chunks ? 1 : 0));
  }
  return token;
}

// Success if the step's layers can be spread over the layout's stages at all.
Status CheckStages(const StepModel& step, const Layout& layout) {
  const uint64_t chunks = uint64_t{layout.pp} * layout.vpp;
  const uint64_t layers = step.LayerCount();
  if (!layout.split.empty()) {
    const uint64_t sum = std::accumulate(layout.split.begin(), layout.split.end(), uint64_t{0});
    if (layout.split.size() != chunks || sum != layers) {
      return Refuse("the split has ", sum, " layers in ", layout.split.size(),
                    " stages, but the "
                    "step has ",
                    layers, " for ", chunks);
    }
    return {};
  }
  if (chunks == 1) return {};
  if (layers == 0) {
    return Fail(Invalid("pp", layout.pp, ": no parameter has a layer number")
                    .Needing("adopt with --family FILE (a family with layer rules)"));
  }
  if (layers % chunks != 0) {
    return Fail(Invalid(layers, " layers do not divide by ", chunks, " stages")
                    .Needing(StrCat("add a split such as ", SuggestSplit(layers, chunks))));
  }
  return {};
}

Result<uint32_t> StageOfLayer(const StepModel& step, const Layout& layout, uint32_t layer) {
  const uint32_t layers = step.LayerCount();
  if (layer >= layers)
    return Refuse("layer ", layer,
                  " does not exist in a "
                  "step of ",
                  layers, " layers");
  uint64_t chunk = 0;
  if (layout.split.empty()) {
    const uint64_t chunks = uint64_t{layout.pp} * layout.vpp;
    chunk = layer / (layers / chunks);
  } else {
    uint64_t end = layout.split[0];
    while (layer >= end) end += layout.split[++chunk];
  }
  return static_cast<uint32_t>(chunk % layout.pp);
}

Status CheckExpert(const StepModel& step, const Layout& layout, const Parameter& parameter) {
  const uint32_t experts = step.ExpertsOf(parameter);
  if (layout.ep > 1 && experts % layout.ep != 0) {
    return Refuse(experts, " experts do not divide by ep", layout.ep);
  }
  if (parameter.stacked_experts > 0 &&
      (parameter.shape.empty() || parameter.shape[0] % parameter.stacked_experts != 0)) {
    return Refuse("dim 0 of ", ShapeToString(parameter.shape), " does not hold ",
                  parameter.stacked_experts, " stacked experts");
  }
  if (layout.etp > 1 &&
      (parameter.stacked_experts > 0 || parameter.pattern.kind == PatternKind::kUnique)) {
    return Refuse("nothing says how one expert is cut for etp", layout.etp);
  }
  return {};
}

// The source's own tensor-parallel degree and its own pipeline are shown as its
// ranks held them; all others follow the rules.
bool IsOwnPipeline(const StepModel& step, const Layout& layout) {
  return layout.pp == step.layout.pp && layout.vpp == step.layout.vpp &&
         layout.split == step.layout.split;
}

const Pattern& PatternFor(const StepModel& step, const Layout& layout, const Parameter& parameter) {
  const bool own = parameter.source_pattern && layout.tp == step.layout.tp;
  return own ? *parameter.source_pattern : parameter.pattern;
}

Result<LocalTensor> Local(const StepModel& step, const Layout& layout, const RankCoordinate& rank,
                          const Parameter& parameter) {
  if (parameter.stacked_experts > 0) {
    return MakeLocal(Pattern::Shard(0), parameter.shape, rank.ep, layout.ep);
  }
  if (parameter.expert) {
    return MakeLocal(parameter.pattern, parameter.shape, rank.etp, layout.etp);
  }
  return MakeLocal(PatternFor(step, layout, parameter), parameter.shape, rank.tp, layout.tp);
}

Status CheckKnown(const StepModel& step, const Layout& layout, const Parameter& parameter) {
  const Pattern& pattern = PatternFor(step, layout, parameter);
  if (layout.tp == 1) return {};
  if (pattern.kind == PatternKind::kUnique) {
    return Refuse(
        "only one tensor-parallel rank held it, and nothing says which rank holds it "
        "at tp",
        layout.tp);
  }
  if (pattern.kind != PatternKind::kUnknown) return {};
  if (parameter.source_pattern) {
    return Fail(Invalid("its source cut it unevenly over tp", step.layout.tp,
                        ", and nothing says in which units tp", layout.tp, " may cut it")
                    .Needing("adopt with --family FILE (a rule for this name)"));
  }
  return Fail(
      Invalid("no rule says how it is spread over tensor-parallel ranks")
          .Needing("adopt with --family FILE (a rule for this name), --family-set NAME=NUMBER "
                   "(a size that the rule needs) or --replicated REGEX"));
}

// "--family-set heads=NUMBER --family-set head_dim=NUMBER" of "heads, head_dim".
std::string FlagsFor(std::string_view missing) {
  std::string flags;
  for (size_t begin = 0; begin < missing.size();) {
    const size_t end = std::min(missing.find(", ", begin), missing.size());
    flags += StrCat(begin == 0 ? "" : " ", "--family-set ", missing.substr(begin, end - begin),
                    "=NUMBER");
    begin = end + 2;
  }
  return flags;
}

// Names the sizes that the parameter's family rule lacks; nothing if it lacks none, or if no rule
// covers the parameter.
std::optional<Error> MissingSizes(const StepModel& step, const Parameter& parameter,
                                  std::shared_ptr<const Family>& family, std::string& below) {
  if (step.family_rules.empty()) return std::nullopt;
  if (!family) {
    auto parsed = Family::Parse(step.family_rules, step.family);
    if (!parsed) return std::nullopt;
    family = std::make_shared<const Family>(*std::move(parsed));
    std::vector<std::string> names;
    for (const Parameter& one : step.parameters) names.push_back(one.name);
    below = FamilySet().ChooseBelow(names, family.get()).below;
  }
  const auto match = family->Match(parameter.name, step.family_sizes, below);
  if (!match || !*match || (*match)->missing.empty()) return std::nullopt;
  const std::string& missing = (*match)->missing;
  return Invalid("nothing tells ", missing, ", which the rules of family ", step.family, " need")
      .Needing(StrCat("adopt with ", FlagsFor(missing),
                      ", or with the model's config.json beside the checkpoint"));
}

// The first that is wrong with a parameter.
void CheckParameter(const StepModel& step, const Layout& layout, const Parameter& parameter,
                    ParameterRefusals& refusals) {
  const bool expert = IsExpert(parameter);
  const Status known =
      expert ? CheckExpert(step, layout, parameter) : CheckKnown(step, layout, parameter);
  if (!known) {
    return expert ? refusals.Add(parameter, known.error())
                  : refusals.AddCut(parameter, known.error());
  }
  if (const auto stages = StagesOf(step, layout, parameter); !stages) {
    return refusals.Add(parameter, stages.error());
  }
  const auto local = Local(step, layout, RankCoordinate{}, parameter);
  if (!local) refusals.AddCut(parameter, local.error());
}

}  // namespace

void ParameterRefusals::AddCut(const Parameter& parameter, Error reason) {
  auto missing = MissingSizes(step_, parameter, family_, below_);
  Add(parameter, missing ? *std::move(missing) : std::move(reason));
}

void ParameterRefusals::Add(const Parameter& parameter, Error reason) {
  const auto same = std::ranges::find(reasons_, reason.message,
                                      [](const Reason& one) { return one.error.message; });
  if (same != reasons_.end()) {
    ++same->parameters;
  } else {
    reason.parameter = parameter.name;
    reasons_.push_back({std::move(reason), 1});
  }
}

Status ParameterRefusals::Finish() const {
  constexpr size_t kShown = 3;
  if (reasons_.empty()) return {};
  Error all = reasons_.front().error;
  all.message.clear();
  for (size_t i = 0; i < std::min(reasons_.size(), kShown); ++i) {
    const auto& [error, parameters] = reasons_[i];
    all.message += StrCat(i == 0 ? "" : "; ", "'", error.parameter, "'");
    if (parameters > 1) all.message += StrCat(" and ", parameters - 1, " more");
    all.message += StrCat(": ", error.message);
    if (all.needs.empty()) all.needs = error.needs;
  }
  if (reasons_.size() > kShown) {
    all.message +=
        StrCat("; and ", reasons_.size() - kShown, " other reasons of further parameters");
  }
  return Fail(std::move(all));
}

Status CheckDegrees(const StepModel& step, const Layout& layout) {
  uint64_t largest = 1;
  for (const Parameter& parameter : step.parameters) {
    if (!IsOfModel(parameter)) continue;
    for (const uint64_t dim : parameter.shape) largest = std::max(largest, dim);
  }
  for (const auto& [name, degree] : {std::pair("tp", layout.tp), std::pair("etp", layout.etp)}) {
    if (degree <= largest) continue;
    return Refuse(name, degree, ": no dimension of any parameter is above ", largest,
                  ", so that most ranks would hold nothing");
  }
  const uint64_t chunks = uint64_t{layout.pp} * layout.vpp;
  const uint64_t layers = step.LayerCount();  // 0: not known
  if (chunks > (layers > 0 ? layers + 2 : std::max<uint64_t>(step.parameters.size(), 2))) {
    return Refuse(chunks, " pipeline stages: the step has ", layers, " layers and ",
                  step.parameters.size(), " parameters");
  }
  const uint64_t most = std::max(kSensibleWorld, kSensibleGrowth * step.layout.World());
  if (layout.World() > most) {
    return Refuse(layout.World(), " ranks are too many: a step of ", step.layout.World(),
                  " ranks is shown for at most ", most, " ranks");
  }
  return {};
}

Status CheckLayout(const StepModel& step, const Layout& layout, bool trainable_only) {
  CKPT_RETURN_IF_ERROR(CheckDegrees(step, layout));
  // Its own needs no rule but for what nothing tells the stage of (StagesOf).
  if (!IsOwnPipeline(step, layout)) CKPT_RETURN_IF_ERROR(CheckStages(step, layout));
  bool experts = false;
  ParameterRefusals refusals(step);
  for (const Parameter& parameter : step.parameters) {
    if (!IsOfModel(parameter)) continue;
    experts = experts || IsExpert(parameter);
    if (trainable_only && parameter.role != Role::kTrainable) continue;
    CheckParameter(step, layout, parameter, refusals);
  }
  CKPT_RETURN_IF_ERROR(refusals.Finish());
  if (!experts && (layout.ep > 1 || layout.etp > 1)) {
    return Fail(Invalid("ep", layout.ep, " etp", layout.etp, ": the step has no experts")
                    .Needing("leave ep and etp out of the layout"));
  }
  return {};
}

Result<std::vector<uint32_t>> StagesOf(const StepModel& step, const Layout& layout,
                                       const Parameter& parameter) {
  const uint32_t last = layout.pp - 1;
  if (layout.pp == 1) return std::vector<uint32_t>{0};
  if (!parameter.source_stages.empty() && IsOwnPipeline(step, layout)) {
    return parameter.source_stages;
  }
  const bool tied = IsTied(step, parameter);
  switch (parameter.stage) {
    case StageRule::kFirst:
    case StageRule::kLast:
      if (tied) return std::vector<uint32_t>{0, last};
      return std::vector<uint32_t>{parameter.stage == StageRule::kFirst ? 0 : last};
    case StageRule::kFirstLast: return std::vector<uint32_t>{0, last};
    case StageRule::kLayer: {
      if (tied) break;  // shared between layers: which stages use it is not known
      CKPT_RETURN_IF_ERROR(CheckStages(step, layout));
      CKPT_ASSIGN_OR_RETURN(const uint32_t stage, StageOfLayer(step, layout, parameter.layer));
      return std::vector<uint32_t>{stage};
    }
    case StageRule::kEvery: break;
  }
  std::vector<uint32_t> every(layout.pp);
  std::iota(every.begin(), every.end(), 0);
  return every;
}

Result<std::optional<uint32_t>> StageOf(const StepModel& step, const Layout& layout,
                                        const Parameter& parameter) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<uint32_t> stages, StagesOf(step, layout, parameter));
  if (stages.size() == 1) return std::optional<uint32_t>(stages[0]);
  return std::optional<uint32_t>();
}

Result<bool> Holds(const StepModel& step, const Layout& layout, const RankCoordinate& rank,
                   const Parameter& parameter) {
  if (!IsOfModel(parameter)) return false;
  if (parameter.expert && layout.ep > 1) {
    const uint32_t experts = step.ExpertsOf(parameter);
    if (experts % layout.ep != 0) {
      return Fail(
          Invalid(experts, " experts do not divide by ep", layout.ep).OfParameter(parameter.name));
    }
    if (*parameter.expert / (experts / layout.ep) != rank.ep) return false;
  }
  if (layout.pp == 1) return true;
  CKPT_ASSIGN_OR_RETURN(const std::vector<uint32_t> stages, StagesOf(step, layout, parameter));
  for (uint32_t stage : stages) {
    if (stage == rank.pp) return true;
  }
  return false;
}

Result<std::shared_ptr<const LocalTensor>> LocalOf(const StepModel& step, const Layout& layout,
                                                   const RankCoordinate& rank,
                                                   const Parameter& parameter) {
  Result<LocalTensor> local = Local(step, layout, rank, parameter);
  if (!local) return Fail(std::move(local).error().OfParameter(parameter.name));
  return std::make_shared<const LocalTensor>(*std::move(local));
}

ZeroSlice ZeroSliceOf(const Layout& layout, const RankCoordinate& rank,
                      const Parameter& parameter) {
  if (!IsExpert(parameter)) return {rank.dp, layout.dp};
  const uint64_t grid = uint64_t{layout.tp} * layout.cp * layout.dp;
  return {rank.edp, grid / (uint64_t{layout.ep} * layout.etp)};
}

std::pair<uint64_t, uint64_t> ZeroRange(uint64_t elements, uint64_t dp, uint64_t degree) {
  const uint64_t slice = CeilDiv(elements, degree);
  return {dp * slice, (dp + 1) * slice};
}

}  // namespace ckptfs
