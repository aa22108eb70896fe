// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/kept_parts.h"

#include <algorithm>
#include <tuple>

#include "core/base/parallel.h"
#include "core/redundancy/comparison_ring.h"

namespace ckptfs {
namespace {

// The parts that a file holds, rising.
using PartList = std::vector<size_t>;

uint64_t Intersection(const std::vector<SharedPart>& parts, const PartList& a, const PartList& b) {
  uint64_t bytes = 0;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    if (*x == *y) bytes += parts[*x].bytes;
    const bool both = *x == *y, next_a = *x < *y;
    if (both || next_a) ++x;
    if (both || !next_a) ++y;
  }
  return bytes;
}

}  // namespace

void AssignKeepers(std::vector<SharedPart> parts, RedundancyReport& report) {
  std::sort(parts.begin(), parts.end(), [](const SharedPart& a, const SharedPart& b) {
    return std::tie(b.bytes, a.tensor, a.holders) < std::tie(a.bytes, b.tensor, b.holders);
  });
  for (const SharedPart& part : parts) {
    const uint32_t keeper =
        *std::min_element(part.holders.begin(), part.holders.end(), [&](uint32_t a, uint32_t b) {
          return std::tie(report.files[a].kept, a) < std::tie(report.files[b].kept, b);
        });
    report.files[keeper].kept += part.bytes;
    std::vector<KeptPart>& keeps = report.tensors[part.tensor].keeps;
    const auto known = std::find_if(keeps.begin(), keeps.end(),
                                    [&](const KeptPart& kept) { return kept.file == keeper; });
    if (known == keeps.end()) {
      keeps.push_back({keeper, part.bytes});
    } else {
      known->bytes += part.bytes;
    }
  }
  for (TensorRedundancy& tensor : report.tensors)
    std::sort(tensor.keeps.begin(), tensor.keeps.end());
}

std::optional<std::vector<SharedPair>> PairsOf(const std::vector<SharedPart>& parts, size_t files) {
  std::vector<PartList> by_file(files);
  for (size_t i = 0; i < parts.size(); ++i)
    for (const uint32_t file : parts[i].holders) by_file[file].push_back(i);
  std::vector<uint32_t> sharing;
  for (uint32_t file = 0; file < files; ++file)
    if (!by_file[file].empty()) sharing.push_back(file);
  if (sharing.size() > kMostPairedFiles) return std::nullopt;
  std::vector<SharedPair> pairs;
  for (const RingRound& round : ComparisonRounds(sharing.size())) {
    std::vector<SharedPair> met(round.size());
    ParallelFor(round.size(), [&](size_t i) {
      const auto [a, b] = std::minmax(sharing[round[i].first], sharing[round[i].second]);
      met[i] = {a, b, Intersection(parts, by_file[a], by_file[b])};
    });
    std::copy_if(met.begin(), met.end(), std::back_inserter(pairs),
                 [](const SharedPair& pair) { return pair.bytes > 0; });
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

}  // namespace ckptfs
