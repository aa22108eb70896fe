// SPDX-License-Identifier: Apache-2.0

#include "core/state/ordered_match.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ckptfs {
namespace {

constexpr size_t kMaxStates = size_t{1} << 20;
constexpr size_t kMaxGroups = 64;  // bits of PlacedParameter::groups
constexpr size_t kNone = SIZE_MAX;

using Positions = std::vector<uint32_t>;

struct Arrival {
  int ways = 0;          // 2 stands for more
  size_t group = kNone;  // of the last parameter, if there is one way
};
using Level = std::map<Positions, Arrival>;

class Matcher {
 public:
  Matcher(std::span<const PlacedParameter> parameters,
          std::span<const std::vector<std::optional<Shape>>> groups)
      : parameters_(parameters), groups_(groups) {}

  Result<std::vector<std::optional<size_t>>> Run() {
    std::vector<Level> levels(parameters_.size() + 1);
    levels[0].emplace(Positions(groups_.size(), 0), Arrival{1, kNone});
    size_t states = 0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      for (const auto& [at, arrival] : levels[i]) Step(i, at, arrival.ways, levels[i + 1]);
      if ((states += levels[i + 1].size()) > kMaxStates) {
        return Fail(ErrorCode::kUnsupported, "too many assignments are possible");
      }
    }
    Positions end;
    for (const auto& group : groups_) end.push_back(static_cast<uint32_t>(group.size()));
    const auto last = levels.back().find(end);
    if (last == levels.back().end()) {
      return Fail(ErrorCode::kUnsupported, "the states' shapes do not fit that order");
    }
    if (last->second.ways > 1) {
      return Fail(ErrorCode::kUnsupported, "the states' shapes fit that order in several ways");
    }
    return Trace(levels, std::move(end));
  }

 private:
  static void Add(Level& level, Positions at, int ways, size_t group) {
    Arrival& arrival = level[std::move(at)];
    arrival.ways = std::min(2, arrival.ways + ways);
    arrival.group = group;
  }

  void Step(size_t i, const Positions& at, int ways, Level& next) const {
    size_t left = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      left += groups_[g].size() - at[g];
      const bool may = (parameters_[i].groups >> g & 1) != 0 && at[g] < groups_[g].size();
      if (!may) continue;
      const std::optional<Shape>& wanted = groups_[g][at[g]];
      if (wanted && *wanted != *parameters_[i].shape) continue;
      Positions moved = at;
      ++moved[g];
      Add(next, std::move(moved), ways, g);
    }
    if (parameters_.size() - i > left) Add(next, at, ways, kNone);
  }

  static std::vector<std::optional<size_t>> Trace(const std::vector<Level>& levels, Positions at) {
    std::vector<std::optional<size_t>> out(levels.size() - 1);
    for (size_t i = levels.size() - 1; i > 0; --i) {
      const size_t group = levels[i].at(at).group;
      if (group == kNone) continue;
      out[i - 1] = group;
      --at[group];
    }
    return out;
  }

  std::span<const PlacedParameter> parameters_;
  std::span<const std::vector<std::optional<Shape>>> groups_;
};

}  // namespace

Result<std::vector<std::optional<size_t>>> MatchInOrder(
    std::span<const PlacedParameter> parameters,
    std::span<const std::vector<std::optional<Shape>>> groups) {
  if (groups.size() > kMaxGroups) {
    return Fail(ErrorCode::kUnsupported, "there are too many groups");
  }
  return Matcher(parameters, groups).Run();
}

}  // namespace ckptfs
