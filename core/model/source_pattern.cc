// SPDX-License-Identifier: Apache-2.0
#include "core/model/source_pattern.h"

#include <algorithm>
#include <map>

namespace ckptfs {
namespace {

// Rows [atom, atom + rows) of a dim lie at local rows [local, local + rows).
struct RowRun {
  uint64_t atom = 0;
  uint64_t local = 0;
  uint64_t rows = 0;
  bool operator==(const RowRun&) const = default;
};

// The parts of dim `dim` that a local tensor holds, in local order, neighbours joined;
// nothing if its pieces are not whole rows of it.
std::optional<std::vector<RowRun>> RunsAlong(const LocalTensor& local, const Shape& atom,
                                             uint32_t dim) {
  const std::vector<uint64_t> strides = RowMajorStrides(local.shape);
  std::vector<RowRun> runs;
  for (const Piece& piece : local.pieces) {
    if (std::find(piece.shape.begin(), piece.shape.end(), 0) != piece.shape.end()) continue;
    if (piece.scale != 1.0 || piece.local_offset % strides[dim] != 0) return std::nullopt;
    for (uint32_t d = 0; d < piece.shape.size(); ++d) {
      const bool whole = d == dim || (piece.shape[d] == atom[d] && local.shape[d] == atom[d]);
      const bool dense = piece.shape[d] == 1 || piece.local_strides[d] == strides[d];
      if (!whole || !dense) return std::nullopt;
    }
    runs.push_back({piece.atom_begin[dim], piece.local_offset / strides[dim], piece.shape[dim]});
  }
  std::sort(runs.begin(), runs.end(),
            [](const RowRun& a, const RowRun& b) { return a.local < b.local; });
  std::vector<RowRun> joined;
  for (const RowRun& run : runs) {
    RowRun* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->local + last->rows == run.local &&
        last->atom + last->rows == run.atom) {
      last->rows += run.rows;
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

// True if the pattern gives every rank what it really holds.
bool SaysLocals(const Pattern& pattern, const Shape& shape, std::span<const LocalTensor> locals) {
  for (size_t r = 0; r < locals.size(); ++r) {
    const LocalTensor& local = locals[r];
    const auto said = MakeLocal(pattern, shape, r, locals.size());
    if (!said || said->shape != local.shape) return false;
    if (*said == local) continue;
    if (!IsOneCut(pattern)) return false;
    const uint32_t dim = pattern.cuts[0].dim;
    const auto runs = RunsAlong(local, shape, dim);
    if (!runs || runs != RunsAlong(*said, shape, dim)) return false;
  }
  return true;
}

// The one dim along which the ranks' tensors are cut.
std::optional<uint32_t> CutDimOf(const Shape& shape, std::span<const LocalTensor> locals) {
  std::optional<uint32_t> dim;
  for (const LocalTensor& local : locals) {
    if (local.shape.size() != shape.size()) return std::nullopt;
    for (uint32_t d = 0; d < local.shape.size(); ++d) {
      if (local.shape[d] == shape[d]) continue;
      if (dim && *dim != d) return std::nullopt;
      dim = d;
    }
  }
  return dim;
}

// How the ranks were cut, in the words of a pattern: a part ends where the rows
// of an earlier rank follow.  Nothing if no pattern says it (rows that several
// ranks hold, cuts along several dims).
std::optional<Pattern> SourcePatternOf(const Shape& shape, std::span<const LocalTensor> locals) {
  if (SaysLocals(Pattern::Replicate(), shape, locals)) return Pattern::Replicate();
  const auto dim = CutDimOf(shape, locals);
  if (!dim) return std::nullopt;
  const size_t ranks = locals.size();
  std::map<uint64_t, std::pair<size_t, uint64_t>> owners;  // first row -> rank, rows
  for (size_t r = 0; r < ranks; ++r) {
    const auto runs = RunsAlong(locals[r], shape, *dim);
    if (!runs) return std::nullopt;
    for (const RowRun& run : *runs) {
      if (!owners.emplace(run.atom, std::pair(r, run.rows)).second) return std::nullopt;
    }
  }
  std::vector<uint64_t> parts;
  std::vector<uint64_t> widths;
  std::optional<size_t> last;
  for (const auto& [first, owner] : owners) {
    if (!last || owner.first <= *last) {
      parts.push_back(0);
      widths.insert(widths.end(), ranks, 0);
    }
    last = owner.first;
    parts.back() += owner.second;
    widths[widths.size() - ranks + owner.first] = owner.second;
  }
  Pattern pattern = Pattern::Shard(*dim);
  if (parts.size() > 1) pattern.cuts[0].parts = std::move(parts);
  if (pattern.cuts[0].parts.empty()) {  // padding is at the end of the only part
    widths.clear();
    for (const LocalTensor& local : locals) widths.push_back(local.shape[*dim]);
  }
  pattern.cuts[0].widths = std::move(widths);
  return SaysLocals(pattern, shape, locals) ? std::optional(std::move(pattern)) : std::nullopt;
}

// True if every part of a source's cut has the same width on all ranks.
bool IsEven(const Pattern& source, size_t ranks) {
  if (source.kind != PatternKind::kShard) return true;
  const std::vector<uint64_t>& widths = source.cuts[0].widths;
  for (size_t i = 0; i < widths.size(); ++i) {
    if (widths[i] != widths[i / ranks * ranks]) return false;
  }
  return true;
}

}  // namespace

SourcePatterns SettlePatterns(Pattern pattern, bool ruled, const Shape& shape,
                              std::span<const LocalTensor> locals) {
  const bool known = pattern.kind != PatternKind::kUnknown;
  if (known && SaysLocals(pattern, shape, locals)) return {std::move(pattern), std::nullopt};
  std::optional<Pattern> source = SourcePatternOf(shape, locals);
  if (!source) return {};
  const bool even = IsEven(*source, locals.size());
  if (!known) {
    Pattern made = *source;
    for (Cut& cut : made.cuts) cut.widths.clear();
    if (even && SaysLocals(made, shape, locals)) return {std::move(made), std::nullopt};
    return {Pattern{}, std::move(source)};
  }
  const bool padded = IsOneCut(pattern) && pattern.cuts[0].pad_multiple > 0;
  if (!even && !ruled && !padded) pattern = Pattern{};
  return {std::move(pattern), std::move(source)};
}

}  // namespace ckptfs
