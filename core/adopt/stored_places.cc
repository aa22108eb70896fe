// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/stored_places.h"

#include <algorithm>
#include <tuple>

namespace ckptfs {

std::vector<ByteRange> MergedRanges(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const ByteRange& a, const ByteRange& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  std::vector<ByteRange> merged;
  for (const ByteRange& range : ranges) {
    if (merged.empty() || range.begin > merged.back().end) {
      merged.push_back(range);
    } else {
      merged.back().end = std::max(merged.back().end, range.end);
    }
  }
  return merged;
}

std::optional<ByteRange> RangeOf(const StoredTensor& tensor) {
  if (tensor.atom || ElementCount(tensor.shape).value_or(0) == 0) return std::nullopt;
  uint64_t last = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    last += (tensor.shape[d] - 1) * tensor.strides[d];
  }
  return ByteRange{tensor.offset, tensor.offset + ByteCount({last + 1}, tensor.dtype).value_or(0)};
}

std::optional<Fragment> WholeFragment(const Atom& atom) {
  const Gather* gather = GatherCopied(atom.source);
  if (gather == nullptr || gather->locals.size() != 1 || gather->series.size() != 1) return {};
  const FragmentSeries& series = gather->series.front();
  const bool whole = series.count == 1 && series.flat_begin == 0 && series.dtype == atom.dtype &&
                     series.elements == ElementCount(atom.shape).value_or(0) &&
                     gather->locals.front() == WholeTensor(atom.shape);
  return whole ? std::optional(series.At(0)) : std::nullopt;
}

bool IsScaled(const Gather& gather) {
  return std::ranges::any_of(gather.locals, [](const LocalTensor& local) {
    return std::ranges::any_of(local.pieces, [](const Piece& piece) { return piece.scale != 1.0; });
  });
}

}  // namespace ckptfs
