// SPDX-License-Identifier: Apache-2.0

#include "core/view/reader_demands.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/model/step_counts.h"
#include "core/view/shard.h"

namespace ckptfs {
namespace {

// torch.optim 2.13, and DeepSpeed's optimizers of 0.19.7.  SGD's first momentum is the gradient,
// which is what zeros lead to without dampening.
constexpr std::array<std::string_view, 11> kBeginAsZeros = {
    "exp_avg",  "exp_avg_sq", "max_exp_avg_sq",  "exp_inf", "square_avg", "acc_delta", "grad_avg",
    "variance", "ax",         "momentum_buffer", "prev"};

bool Contains(std::span<const std::string_view> kinds, std::string_view kind) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

std::string Quoted(std::span<const std::string_view> kinds) {
  std::string text;
  for (size_t i = 0; i < kinds.size(); ++i) {
    text += StrCat(i == 0 ? "" : i + 1 == kinds.size() ? " and " : ", ", "'", kinds[i], "'");
  }
  return text;
}

// Says what a state's form lacks; empty if the reader takes it.
std::string WhyNotTaken(const Atom& atom, const ReaderDemands& reader) {
  if (!reader.takes.empty() && !Contains(reader.takes, atom.kind)) {
    return StrCat("takes ", Quoted(reader.takes), " and no other state");
  }
  if (atom.kind == "step") {
    return atom.relation == Relation::kScalar ? "" : "takes only a 'step' that is one number";
  }
  if (atom.relation == Relation::kScalar && !reader.numbers)
    return "does not take a state that "
           "is one number";
  const bool other = atom.relation == Relation::kReduced || atom.relation == Relation::kOpaque;
  if (other && !reader.own_shapes)
    return "does not take a state of another shape than the "
           "parameter's";
  if (reader.flat && !IsFloat(atom.dtype)) {
    return StrCat("keeps states as fp32, but this one is ", DTypeName(atom.dtype));
  }
  return "";
}

class Check {
 public:
  Check(const ShownState& shown, const ReaderDemands& reader, const Layout& layout)
      : shown_(shown), step_(shown.step()), reader_(reader), layout_(layout) {}

  Status Run() const {
    CKPT_RETURN_IF_ERROR(CheckForms());
    CKPT_RETURN_IF_ERROR(CheckOptimizers());
    for (size_t g = 0; g < shown_.groups().size(); ++g) {
      if (MembersOf(g).empty()) continue;  // its members are frozen or not recorded
      CKPT_RETURN_IF_ERROR(CheckAsked(g));
      CKPT_RETURN_IF_ERROR(CheckFilled(g));
      CKPT_RETURN_IF_ERROR(CheckWhole(g));
      CKPT_RETURN_IF_ERROR(CheckSlices(g));
      if (reader_.counts != ReaderDemands::Counts::kPerGroup) continue;
      if (Status one = CheckOneStep(step_, MembersOf(g)); !one) {
        return Fail(std::move(one).error().WithContext(
            StrCat("group ", g, ", whose steps an engine counts once")));
      }
    }
    if (reader_.counts != ReaderDemands::Counts::kOnce) return {};
    if (Status one = CheckOneStep(step_); !one) {
      return Fail(std::move(one).error().WithContext(
          StrCat(reader_.reader, " counts the steps of all groups once")));
    }
    return {};
  }

 private:
  tl::unexpected<Error> Refuse(std::string_view kind, const std::vector<ParameterIndex>& of,
                               const std::string& why) const {
    const std::string& first = step_.parameter(of.front()).name;
    const std::string more = of.size() > 1 ? StrCat(" and ", of.size() - 1, " more") : "";
    Error error{ErrorCode::kUnsupported,
                StrCat("state '", kind, "' of '", first, "'", more, ": ", why)};
    error.parameter = first;
    return Fail(std::move(error).Needing(reader_.remedy));
  }

  Status CheckForms() const {
    std::map<std::pair<std::string, std::string>, std::vector<ParameterIndex>> lost;
    for (const AtomIndex index : shown_.states()) {
      const Atom& atom = step_.atom(index);
      if (Contains(reader_.made_anew, atom.kind)) continue;
      std::string why = WhyNotTaken(atom, reader_);
      if (!why.empty()) lost[{atom.kind, std::move(why)}].push_back(atom.parameter);
    }
    if (lost.empty()) return {};
    const auto& [what, parameters] = *lost.begin();
    return Refuse(what.first, parameters,
                  StrCat(reader_.reader, " ", what.second,
                         "; the optimizer would silently go on without it"));
  }

  Status CheckOptimizers() const {
    if (reader_.optimizers) return {};
    std::set<std::pair<ParameterIndex, std::string_view>> seen;
    for (const AtomIndex index : shown_.states()) {
      const Atom& atom = step_.atom(index);
      if (seen.emplace(atom.parameter, atom.kind).second) continue;
      return Refuse(atom.kind, {atom.parameter},
                    StrCat("two optimizers have this state, but ", reader_.reader,
                           " has one "
                           "optimizer"));
    }
    return {};
  }

  const std::vector<ParameterIndex>& MembersOf(size_t group) const {
    return shown_.groups()[group].members;
  }
  const StatesByKind& KindsOf(size_t group) const { return shown_.groups()[group].kinds; }

  Status CheckAsked(size_t group) const {
    for (const std::string_view kind : reader_.asks) {
      if (KindsOf(group).contains(kind)) continue;
      return Refuse(kind, MembersOf(group),
                    StrCat(reader_.reader, " asks for ", Quoted(reader_.asks),
                           " of every "
                           "parameter, but ",
                           "group ", group, " does not have this one"));
    }
    return {};
  }

  // A reader that keeps one vector per group has every state for all members.
  Status CheckFilled(size_t group) const {
    if (!reader_.flat) return {};
    for (const auto& [kind, first] : KindsOf(group)) {
      if (kind == "step" || Contains(reader_.made_anew, kind)) continue;
      std::vector<ParameterIndex> lacking;
      for (const ParameterIndex p : MembersOf(group)) {
        if (!step_.FindAtom(p, kind)) lacking.push_back(p);
      }
      if (lacking.empty()) continue;
      const std::string why = WhyNotBegun(step_.atom(first), lacking);
      if (why.empty()) continue;
      return Refuse(kind, lacking,
                    StrCat("the source does not have it, though other parameters of group ", group,
                           " do; ", reader_.reader, " keeps one for the whole group, and ", why));
    }
    return {};
  }

  // Why zeros do not stand for a state that these parameters lack; "" if they never had a
  // gradient, and the optimizer begins the state with zeros.
  // `other`: the state of a parameter that has it.
  std::string WhyNotBegun(const Atom& other, const std::vector<ParameterIndex>& lacking) const {
    if (!BeginsAsZeros(other.kind)) return "nothing tells its first value";
    for (const ParameterIndex p : lacking) {
      if (!HasBegun(shown_, p)) continue;
      return StrCat("'", step_.parameter(p).name,
                    "' has other states, so it did not begin at zero");
    }
    const LeftOut* const lost = FindLostState(step_, other.optimizer);
    return lost == nullptr ? ""
                           : StrCat("it may be a part of what was left out (", lost->what,
                                    "), so it is not known to be zero");
  }

  Status CheckWhole(size_t group) const {
    if (layout_.dp == 1 || group >= step_.groups.size()) return {};
    const std::string& hyper_parameters = step_.groups[group].hyper_parameters;
    for (const WholeState& whole : reader_.whole) {
      if (!KindsOf(group).contains(whole.kind)) continue;
      const bool named = std::any_of(
          whole.words.begin(), whole.words.end(),
          [&](std::string_view word) { return hyper_parameters.find(word) != std::string::npos; });
      if (!named) continue;
      return Refuse(whole.kind, MembersOf(group),
                    StrCat("its optimizer keeps it for whole parameters, but "
                           "at dp",
                           layout_.dp, " ", reader_.reader,
                           " gives each rank a slice that begins inside a "
                           "parameter"));
    }
    return {};
  }

  // Elements of the group that a tensor-parallel rank has; nothing where it is not known.
  std::optional<uint64_t> ElementsOf(size_t group) const {
    Layout cut;
    cut.tp = layout_.tp;
    uint64_t elements = 0;
    for (const ParameterIndex p : MembersOf(group)) {
      const Parameter& parameter = step_.parameter(p);
      if (parameter.expert || parameter.stacked_experts > 0) return std::nullopt;
      const auto local = LocalOf(step_, cut, RankCoordinate{}, parameter);
      const auto count = local ? ElementCount((*local)->shape) : Result<uint64_t>(0);
      if (!local || !count) return std::nullopt;
      elements += *count;
    }
    return elements;
  }

  Status CheckSlices(size_t group) const {
    if (reader_.slice_unit == 0 || layout_.dp == 1 || layout_.pp > 1) return {};
    const auto elements = ElementsOf(group);
    const uint64_t unit = uint64_t{reader_.slice_unit} * layout_.dp;
    if (!elements || *elements == 0) return {};
    const uint64_t slice = CeilDiv(*elements, unit) * reader_.slice_unit;
    if ((layout_.dp - 1) * slice < *elements) return {};
    Error error{
        ErrorCode::kUnsupported,
        StrCat("group ", group, " has ", *elements, *elements == 1 ? " element ('" : " elements ('",
               step_.parameter(MembersOf(group).front()).name, "', ...): at dp", layout_.dp,
               " some ranks do not get one, "
               "and ",
               reader_.reader, " fails on such a rank")};
    return Fail(std::move(error).Needing("ask for a smaller dp"));
  }

  const ShownState& shown_;
  const StepModel& step_;
  const ReaderDemands& reader_;
  const Layout& layout_;
};

}  // namespace

bool HasBegun(const ShownState& shown, ParameterIndex parameter) {
  return !shown.StatesOf(parameter).empty();
}

bool BeginsAsZeros(std::string_view kind) { return Contains(kBeginAsZeros, kind); }

Status CheckDemands(const ShownState& shown, const ReaderDemands& reader, const Layout& layout) {
  const bool asks = !reader.asks.empty() && !shown.step().groups.empty();
  if (shown.states().empty() && !asks) return {};
  return Check(shown, reader, layout).Run();
}

}  // namespace ckptfs
