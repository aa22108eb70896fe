// SPDX-License-Identifier: Apache-2.0

#include "core/state/ownership.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/base/strings.h"
#include "core/state/joined_names.h"
#include "core/state/ordered_match.h"
#include "core/state/rival_orders.h"
#include "core/state/state_fit.h"

namespace ckptfs {
namespace {

constexpr std::string_view kRemedy =
    "`adopt --parameter-order FILE` takes them: FILE names the optimizer's parameters in its "
    "order, group by group, one a line; `--weights-only` takes the weights alone, without this "
    "message";

constexpr size_t kMaxParts = 256;  // that may stand before names, of which one fits

class Decider {
 public:
  explicit Decider(const OwnershipQuestion& question) : q_(question) {
    for (size_t i = 0; i < q_.parameters.size(); ++i) by_name_.emplace(q_.parameters[i].name, i);
    for (const OwnableParameter& one : q_.elsewhere) elsewhere_.emplace(one.shape, one.name);
    taken_.resize(q_.parameters.size());
    told_.resize(q_.groups.size());
  }

  Result<StateOwners> Run() {
    for (size_t g = 0; g < q_.groups.size(); ++g) {
      out_.groups.emplace_back(q_.groups[g].size());
      for (size_t i = 0; i < q_.groups[g].size(); ++i) Read({g, i});
    }
    ByName();
    if (open_.empty()) return std::move(out_);
    if (q_.masters) {
      CKPT_ASSIGN_OR_RETURN(prints_, q_.masters());
    }
    if (!Prove()) {
      for (const Place place : open_) OwnerOf(place) = {};
      out_.why = std::move(why_);
      out_.remedy = kRemedy;
    }
    return std::move(out_);
  }

 private:
  // A member: its group, and its number there.
  struct Place {
    size_t group;
    size_t i;
  };
  // Facts that are known of a member.
  struct Told {
    std::optional<Shape> shape;  // of its parameter
    bool blank = false;          // it has no states
  };

  const OptimizerMember& MemberOf(Place at) const { return q_.groups[at.group][at.i]; }
  Owner& OwnerOf(Place at) { return out_.groups[at.group][at.i]; }

  void Read(Place at) {
    const OptimizerMember& member = MemberOf(at);
    std::vector<std::pair<std::string_view, const Shape*>> states;
    for (const MemberState& state : member.states) states.emplace_back(state.kind, &state.shape);
    told_[at.group].push_back({member.master ? member.master : WholeShapeOf(states),
                               member.states.empty() && !member.master});
  }

  std::optional<size_t> Find(std::string_view name) const {
    auto found = by_name_.find(name);
    if (found != by_name_.end()) return found->second;
    const auto second = q_.second_names.find(name);
    if (second == q_.second_names.end()) return std::nullopt;
    found = by_name_.find(second->second);
    return found == by_name_.end() ? std::nullopt : std::optional(found->second);
  }

  void Give(Place at, size_t parameter, Evidence evidence) {
    OwnerOf(at) = {parameter, evidence, ""};
    taken_[parameter] = true;
  }

  // Those of the live names that are the model's but for a part of each (JoinNames).
  std::map<std::string, std::string> Joined(std::vector<std::string> live) const {
    std::erase_if(live, [&](const std::string& name) { return name.empty() || Find(name); });
    if (live.empty()) return {};
    std::vector<std::string> model;
    for (const OwnableParameter& parameter : q_.parameters) model.push_back(parameter.name);
    return JoinNames(model, live);
  }
  std::map<std::string, std::string> JoinedNames() const {
    std::vector<std::string> names;
    for (const auto& group : q_.groups) {
      for (const OptimizerMember& member : group) names.push_back(member.name);
    }
    return Joined(std::move(names));
  }

  // The parameter of a name; by a joined one only if the member's shapes are its, too.
  std::optional<size_t> Named(Place at, const std::map<std::string, std::string>& joined) const {
    const std::string& name = MemberOf(at).name;
    if (const auto parameter = Find(name)) return parameter;
    const auto other = joined.find(name);
    const auto parameter = other == joined.end() ? std::nullopt : Find(other->second);
    return parameter && CanBe(at, *parameter) ? parameter : std::nullopt;
  }

  bool IsCalled(Place at, const std::string& name) const {
    const auto parameter = Find(name);
    return parameter && CanBe(at, *parameter);
  }

  // The part before all members' names with which they are the model's, if one alone fits all:
  // a module that holds another ("self.model = ...") may give that one's names to the optimizer.
  // "" where the names are the model's as they are, or nothing tells the part.
  std::string PartBefore() const {
    std::vector<Place> named;
    bool all = true;
    for (size_t g = 0; g < q_.groups.size(); ++g) {
      for (size_t i = 0; i < q_.groups[g].size(); ++i) {
        const std::string& name = q_.groups[g][i].name;
        if (!name.empty()) named.push_back({g, i});
        all = all && (name.empty() || IsCalled({g, i}, name));
      }
    }
    if (named.empty() || all) return "";
    std::string part;
    const std::string end = StrCat(".", MemberOf(named.front()).name);
    size_t tried = 0;
    for (const OwnableParameter& parameter : q_.parameters) {
      if (!parameter.name.ends_with(end)) continue;
      if (++tried > kMaxParts) return "";
      const std::string before = parameter.name.substr(0, parameter.name.size() - end.size() + 1);
      const bool fits = std::ranges::all_of(
          named, [&](Place at) { return IsCalled(at, before + MemberOf(at).name); });
      if (fits && !part.empty()) return "";
      if (fits) part = before;
    }
    return part;
  }

  void ByName() {
    const std::string before = PartBefore();
    const std::map<std::string, std::string> joined = JoinedNames();
    std::map<size_t, Place> named;
    for (size_t g = 0; g < q_.groups.size(); ++g) {
      for (size_t i = 0; i < q_.groups[g].size(); ++i) {
        const std::string& name = q_.groups[g][i].name;
        if (name.empty()) {
          open_.push_back({g, i});
          continue;
        }
        const auto parameter = before.empty() ? Named({g, i}, joined) : Find(before + name);
        if (!parameter) {
          OwnerOf({g, i}).why = StrCat("'", name, "' is not a parameter of the model");
          continue;
        }
        const auto [first, added] = named.try_emplace(*parameter, Place{g, i});
        if (added) {
          Give({g, i}, *parameter, Evidence::kName);
          continue;
        }
        for (const Place place : {first->second, Place{g, i}}) {
          OwnerOf(place) = {std::nullopt, Evidence::kNone,
                            StrCat("'", name, "' is named twice by the optimizer")};
        }
      }
    }
  }

  // True if the member's moments, its shape and its master can be the parameter's.
  bool CanBe(Place at, size_t parameter) const {
    const Shape& shape = q_.parameters[parameter].shape;
    if (told_[at.group][at.i].shape && *told_[at.group][at.i].shape != shape) return false;
    for (const MemberState& state : MemberOf(at).states) {
      if (IsWholeKind(state.kind) && !FitOf(state.kind, state.shape, shape)) return false;
    }
    const auto* print = PrintOf(at);
    const auto* own = prints_ ? &prints_->parameters[parameter] : nullptr;
    return print == nullptr || !*print || !*own || **print == **own;
  }

  const std::optional<std::string>* PrintOf(Place at) const {
    return prints_ ? &prints_->members[at.group][at.i] : nullptr;
  }

  bool Prove() {
    if (!q_.order.empty()) return ByOrder();
    if (q_.rule && ByRule()) return true;
    const std::string rule = std::exchange(why_, "");
    if (ByContent()) return true;
    if (!rule.empty()) why_ += StrCat("; ", rule);
    return false;
  }

  bool No(std::string why) {
    why_ = std::move(why);
    return false;
  }

  // ---- the user's word ------------------------------------------------------------------

  bool ByOrder() {
    size_t members = 0;
    for (const auto& group : q_.groups) members += group.size();
    if (q_.order.size() != members) {
      return No(StrCat("--parameter-order names ", Counted(q_.order.size(), "parameter"),
                       ", but the optimizer has ", members, " (in ",
                       Counted(q_.groups.size(), "group"), ")"));
    }
    std::vector<Place> places;
    for (size_t g = 0; g < q_.groups.size(); ++g) {
      for (size_t i = 0; i < q_.groups[g].size(); ++i) places.push_back({g, i});
    }
    const std::map<std::string, std::string> joined = Joined({q_.order.begin(), q_.order.end()});
    for (size_t k = 0; k < places.size(); ++k) {
      if (!MemberOf(places[k]).name.empty()) continue;
      const auto other = joined.find(q_.order[k]);
      const auto parameter = Find(other == joined.end() ? q_.order[k] : other->second);
      if (!parameter) {
        return No(StrCat("--parameter-order: '", q_.order[k], "' is not a parameter of the model"));
      }
      if (taken_[*parameter]) {
        return No(StrCat("--parameter-order names '", q_.order[k], "' twice"));
      }
      if (!CanBe(places[k], *parameter)) return No(DoesNotFit(places[k], k, *parameter));
      Give(places[k], *parameter, Evidence::kOrder);
    }
    return true;
  }

  std::string DoesNotFit(Place at, size_t number, size_t parameter) const {
    const OwnableParameter& wanted = q_.parameters[parameter];
    const auto& told = told_[at.group][at.i].shape;
    std::string has = "another master";
    if (told && *told != wanted.shape) has = StrCat("states of shape ", ShapeToString(*told));
    for (const MemberState& state : MemberOf(at).states) {
      if (!told && IsWholeKind(state.kind) && !FitOf(state.kind, state.shape, wanted.shape)) {
        has = StrCat("state '", state.kind, "' of shape ", ShapeToString(state.shape));
      }
    }
    return StrCat("--parameter-order is not the optimizer's order: its member ", number, " has ",
                  has, ", but '", wanted.name, "' is of shape ", ShapeToString(wanted.shape));
  }

  // ---- the tool's own rule ----------------------------------------------------------------

  // A rule speaks of the whole optimizer, so names beside it must agree with it.
  bool ByRule() {
    std::vector<PlacedParameter> parameters;
    for (size_t p = 0; p < q_.parameters.size(); ++p) {
      parameters.push_back({&q_.parameters[p].shape, q_.rule->groups[p]});
    }
    std::vector<std::vector<std::optional<Shape>>> shapes(q_.groups.size());
    for (size_t g = 0; g < q_.groups.size(); ++g) {
      for (const Told& told : told_[g]) shapes[g].push_back(told.shape);
    }
    const auto matched = MatchInOrder(parameters, shapes);
    if (!matched) {
      return No(StrCat("the order in which ", q_.rule->tool,
                       " makes its groups does not prove this, since ", matched.error().message));
    }
    std::vector<std::vector<size_t>> groups(q_.groups.size());
    for (size_t p = 0; p < matched->size(); ++p) {
      if ((*matched)[p]) groups[*(*matched)[p]].push_back(p);
    }
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        const Owner& owner = out_.groups[g][i];
        const bool agrees =
            CanBe({g, i}, groups[g][i]) && (!owner.parameter || *owner.parameter == groups[g][i]);
        if (!agrees) {
          return No(
              StrCat("the groups are not in the order in which ", q_.rule->tool, " makes them"));
        }
      }
    }
    if (!IsTheOnlyOrder(*matched, groups)) return false;
    for (const Place at : open_) Give(at, groups[at.group][at.i], Evidence::kRule);
    return true;
  }

  // True if the states fit no order that a script of its own could have: it may have made the
  // tool's groups with the tool's settings, so those prove nothing.
  bool IsTheOnlyOrder(const std::vector<std::optional<size_t>>& group_of,
                      const std::vector<std::vector<size_t>>& groups) {
    bool alone = true;
    const bool all = ForEachRivalOrder(q_.parameters, [&](const std::vector<size_t>& order) {
      std::vector<std::vector<size_t>> rival(groups.size());
      for (const size_t p : order) {
        if (group_of[p]) rival[*group_of[p]].push_back(p);
      }
      if (rival == groups || !CanBeAll(rival)) return false;
      alone = No(StrCat("the states fit ", q_.rule->tool, "'s order, but they also fit ",
                        Difference(groups, rival)));
      return true;
    });
    return all ? alone : No("there are too many orders to look at");
  }

  bool CanBeAll(const std::vector<std::vector<size_t>>& groups) const {
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        if (!CanBe({g, i}, groups[g][i])) return false;
      }
    }
    return true;
  }

  std::string Difference(const std::vector<std::vector<size_t>>& ours,
                         const std::vector<std::vector<size_t>>& rival) const {
    for (size_t g = 0; g < ours.size(); ++g) {
      const auto [our, other] = std::ranges::mismatch(ours[g], rival[g]);
      if (our == ours[g].end()) continue;
      return StrCat("an order in which '", q_.parameters[*other].name, "' stands where it has '",
                    q_.parameters[*our].name, "'");
    }
    return "another order";
  }

  // ---- masters and shapes ------------------------------------------------------------------

  // Members and parameters that could be each other's.
  struct Alike {
    std::vector<Place> members;
    std::vector<size_t> parameters;
  };

  bool ByContent() {
    std::vector<size_t> free;
    for (size_t p = 0; p < taken_.size(); ++p) {
      if (!taken_[p]) free.push_back(p);
    }
    if (open_.size() > free.size()) {
      return No(StrCat("the optimizer has more members than the model has parameters (",
                       open_.size(), " and ", free.size(), ")"));
    }
    std::map<Shape, Alike> by_shape;
    for (const size_t p : free) by_shape[q_.parameters[p].shape].parameters.push_back(p);
    std::vector<Place> silent;  // without a shape
    for (const Place at : open_) {
      const auto& shape = told_[at.group][at.i].shape;
      if (shape) {
        by_shape[*shape].members.push_back(at);
      } else {
        silent.push_back(at);
      }
    }
    for (const auto& [shape, alike] : by_shape) {
      if (!ByMasters(shape, alike)) return false;
    }
    return BySilence(silent);
  }

  // Those of one shape by their masters; where these do not tell, there must be one of each.
  bool ByMasters(const Shape& shape, const Alike& alike) {
    std::map<std::string_view, Alike> by_print;
    for (const Place at : alike.members) {
      const auto* print = PrintOf(at);
      by_print[print != nullptr && *print ? std::string_view(**print) : ""].members.push_back(at);
    }
    for (const size_t p : alike.parameters) {
      const bool told = prints_ && prints_->parameters[p];
      by_print[told ? std::string_view(*prints_->parameters[p]) : ""].parameters.push_back(p);
    }
    const bool told = prints_ && !by_print.contains("");
    if (!told) return OneOfEach(shape, alike, Evidence::kShape);
    for (const auto& [print, same] : by_print) {
      if (!OneOfEach(shape, same, Evidence::kMaster)) return false;
    }
    return true;
  }

  bool OneOfEach(const Shape& shape, const Alike& alike, Evidence evidence) {
    if (alike.members.empty()) return true;
    if (alike.members.size() > alike.parameters.size()) {
      return No(StrCat("no parameter is left for a state of shape ", ShapeToString(shape),
                       evidence == Evidence::kMaster ? " whose master is the weight" : ""));
    }
    if (alike.parameters.size() > 1) {
      return No(StrCat(
          "nothing proves which states belong to '", q_.parameters[alike.parameters[0]].name,
          "' and which to '", q_.parameters[alike.parameters[1]].name, "', both of shape ",
          ShapeToString(shape), evidence == Evidence::kMaster ? " and with equal masters" : ""));
    }
    const auto other = elsewhere_.find(shape);
    if (evidence == Evidence::kShape && other != elsewhere_.end()) {
      return No(StrCat("nothing proves whether states belong to '",
                       q_.parameters[alike.parameters[0]].name, "' or to '", other->second,
                       "' of another module, both of shape ", ShapeToString(shape)));
    }
    if (!CanBe(alike.members[0], alike.parameters[0])) {
      return No(StrCat("a state does not fit '", q_.parameters[alike.parameters[0]].name, "'"));
    }
    Give(alike.members[0], alike.parameters[0], evidence);
    return true;
  }

  // True if a moment is a number, which some optimizers keep for a whole parameter.
  bool HasNumberForMoment(Place at, size_t parameter) const {
    return !q_.parameters[parameter].shape.empty() &&
           std::ranges::any_of(MemberOf(at).states, [](const MemberState& state) {
             return state.shape.empty() && IsWholeKind(state.kind);
           });
  }

  // Members whose states tell no shape: those that are left, if it is one, or if they have no
  // states at all and one group, where it does not matter which is which.
  bool BySilence(const std::vector<Place>& silent) {
    if (silent.empty()) return true;
    std::vector<size_t> left;
    for (size_t p = 0; p < taken_.size(); ++p) {
      if (!taken_[p]) left.push_back(p);
    }
    const bool alike = std::ranges::all_of(silent, [&](Place at) {
      return at.group == silent[0].group && told_[at.group][at.i].blank;
    });
    const bool clear = left.size() == silent.size() && (left.size() == 1 || alike);
    if (!clear) {
      return No(StrCat("a member of group ", silent[0].group,
                       " has no state that tells its parameter's shape"));
    }
    for (size_t k = 0; k < silent.size(); ++k) {
      if (!CanBe(silent[k], left[k]) || HasNumberForMoment(silent[k], left[k])) {
        return No(StrCat("a state does not fit '", q_.parameters[left[k]].name, "'"));
      }
      Give(silent[k], left[k], Evidence::kShape);
    }
    return true;
  }

  const OwnershipQuestion& q_;
  StateOwners out_;
  std::map<std::string_view, size_t> by_name_;
  std::map<Shape, std::string_view> elsewhere_;  // the first name of each shape
  std::vector<bool> taken_;
  std::vector<std::vector<Told>> told_;
  std::vector<Place> open_;  // members without a name
  std::optional<MasterPrints> prints_;
  std::string why_;
};

}  // namespace

std::optional<int64_t> MemberNumber(std::string_view text) {
  if (text.empty() || !IsDigit(text.front())) return std::nullopt;  // from_chars takes a sign
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [last, code] = std::from_chars(text.data(), end, number);
  return code == std::errc() && last == end ? std::optional(number) : std::nullopt;
}

Result<StateOwners> DecideOwners(const OwnershipQuestion& question) {
  return Decider(question).Run();
}

}  // namespace ckptfs
