// SPDX-License-Identifier: Apache-2.0

#include "core/base/edit_distance.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1,
                             cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

std::vector<std::string> NearestWords(std::string_view word, std::span<const std::string> words,
                                      size_t most) {
  std::vector<std::string> nearest;
  size_t least = most;
  for (const std::string& candidate : words) {
    if (word.size() > candidate.size() + most) continue;  // before it costs anything
    const size_t distance = EditDistance(word, candidate);
    if (distance > least || distance >= word.size()) continue;
    if (distance < least) nearest.clear();
    least = distance;
    nearest.push_back(candidate);
  }
  return nearest;
}

std::string MeantText(std::string_view word, std::span<const std::string> words, size_t most) {
  constexpr size_t kShown = 3;
  const std::vector<std::string> near = NearestWords(word, words, most);
  std::string list;
  for (size_t i = 0; i < std::min(near.size(), kShown); ++i)
    list += StrCat(i == 0 ? "" : ", ", near[i]);
  return near.empty() ? "" : StrCat("; do you mean ", list, near.size() > kShown ? ", ...?" : "?");
}

}  // namespace ckptfs
