// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/state_names.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "core/base/strings.h"
#include "formats/deepspeed/model_states.h"

namespace ckptfs::deepspeed {
namespace {

constexpr size_t kMaxStates = 1u << 20;
constexpr int kSkip = -1;
constexpr size_t kStateNamesShown = 5;

// Counts (up to 2) the ways to give every parameter, in order, to the next
// member of some group or to none, level by level, so that nothing recurses.
class Matcher {
 public:
  Matcher(std::span<const NamedShape> parameters,
          std::span<const std::vector<std::optional<Shape>>> groups)
      : parameters_(parameters), groups_(groups) {}

  // The group of each parameter.
  Result<std::vector<int>> Run() {
    std::vector<Level> levels(parameters_.size() + 1);
    levels[0].emplace(Positions(groups_.size(), 0), Arrival{1, kSkip});
    size_t states = 0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      for (const auto& [at, arrival] : levels[i]) Step(i, at, arrival.ways, levels[i + 1]);
      if ((states += levels[i + 1].size()) > kMaxStates) {
        return Fail(ErrorCode::kUnsupported,
                    "the optimizer's groups can be matched to the parameters in too many ways");
      }
    }
    Positions end;
    for (const auto& group : groups_) end.push_back(static_cast<uint32_t>(group.size()));
    const auto last = levels.back().find(end);
    if (last == levels.back().end()) {
      return Fail(ErrorCode::kUnsupported,
                  "the optimizer's states do not fit the parameters' shapes in model order");
    }
    if (last->second.ways > 1) return Fail(Ambiguous());
    return Trace(levels, std::move(end));
  }

 private:
  using Positions = std::vector<uint32_t>;
  struct Arrival {
    int ways = 0;
    int group = kSkip;  // of the last parameter, if there is one way
  };
  using Level = std::map<Positions, Arrival>;

  // Names the parameters whose shape more of them have than states do, or that
  // states of several groups have.
  Error Ambiguous() const {
    std::map<Shape, std::set<size_t>> groups;
    std::map<Shape, int64_t> surplus;
    for (const NamedShape& parameter : parameters_) ++surplus[parameter.shape];
    for (size_t g = 0; g < groups_.size(); ++g) {
      for (const auto& member : groups_[g]) {
        if (!member) continue;
        groups[*member].insert(g);
        --surplus[*member];
      }
    }
    std::string names;
    size_t count = 0;
    for (const NamedShape& parameter : parameters_) {
      const bool open = surplus[parameter.shape] != 0 || groups[parameter.shape].size() > 1;
      if (!open || ++count > kStateNamesShown) continue;
      names += StrCat(names.empty() ? "" : ", ", "'", parameter.name, "' ",
                      ShapeToString(parameter.shape));
    }
    return Error{ErrorCode::kUnsupported,
                 StrCat("the optimizer numbers its parameters and leaves the frozen ones out, and of "
                        "parameters with equal shapes nothing tells which are trained: ", names,
                        count > kStateNamesShown ? StrCat(", ... (", count, " in all)") : "",
                        "; an optimizer made from named_parameters() (torch 2.6) or a ZeRO stage "
                        "above 0 records the names")}
        .Needing("`adopt --weights-only` takes the weights without the optimizer");
  }

  static void Add(Level& level, Positions at, int ways, int group) {
    Arrival& arrival = level[std::move(at)];
    arrival.ways = std::min(2, arrival.ways + ways);
    arrival.group = group;
  }

  void Step(size_t i, const Positions& at, int ways, Level& next) const {
    size_t left = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      left += groups_[g].size() - at[g];
      if (at[g] >= groups_[g].size()) continue;
      const std::optional<Shape>& wanted = groups_[g][at[g]];
      if (wanted && *wanted != parameters_[i].shape) continue;
      Positions moved = at;
      ++moved[g];
      Add(next, std::move(moved), ways, static_cast<int>(g));
    }
    if (parameters_.size() - i > left) Add(next, at, ways, kSkip);
  }

  static std::vector<int> Trace(const std::vector<Level>& levels, Positions at) {
    std::vector<int> out(levels.size() - 1, kSkip);
    for (size_t i = levels.size() - 1; i > 0; --i) {
      const int group = levels[i].at(at).group;
      out[i - 1] = group;
      if (group != kSkip) --at[static_cast<size_t>(group)];
    }
    return out;
  }

  std::span<const NamedShape> parameters_;
  std::span<const std::vector<std::optional<Shape>>> groups_;
};

}  // namespace

Result<std::vector<std::vector<std::string>>> MatchStates(
    std::span<const NamedShape> parameters,
    std::span<const std::vector<std::optional<Shape>>> groups) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<int> group_of, Matcher(parameters, groups).Run());
  std::vector<std::vector<std::string>> out(groups.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (group_of[i] != kSkip) out[static_cast<size_t>(group_of[i])].push_back(parameters[i].name);
  }
  return out;
}

}  // namespace ckptfs::deepspeed
