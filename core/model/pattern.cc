// SPDX-License-Identifier: Apache-2.0
#include "core/model/pattern.h"

#include <algorithm>
#include <optional>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Pieces of one local tensor; fused experts need the most.
constexpr uint64_t kMaxPieces = 1 << 16;

// A run of one dim: atom indices [atom, atom + length) lie at local indices
// [local, local + length).
struct Run {
  uint64_t atom = 0;
  uint64_t local = 0;
  uint64_t length = 0;
};

// The part of one rank along one dim.
struct DimCut {
  uint64_t extent = 0;    // of the local tensor, padding included
  std::vector<Run> runs;  // in local order, never empty runs
};

template <class... Pieces>
tl::unexpected<Error> RefusePattern(const Pieces&... pieces) {
  return Fail(ErrorCode::kInvalid, StrCat("pattern: ", pieces...));
}

DimCut WholeDim(uint64_t size) {
  DimCut whole{size, {}};
  if (size > 0) whole.runs.push_back(Run{0, 0, size});
  return whole;
}

// The cut dim's size before it is split, padding included.
Result<uint64_t> PaddedSize(const Cut& cut, uint64_t size, uint64_t degree,
                            std::optional<uint64_t> local_rows) {
  uint64_t padded = size;
  if (local_rows) {
    CKPT_ASSIGN_OR_RETURN(padded, CheckedMul(*local_rows, degree, "padded rows"));
    if (padded < size || (padded > size && cut.pad_multiple == 0)) {
      return RefusePattern(degree, " ranks of ", *local_rows, " rows each are not the ", size,
                           " rows of dim ", cut.dim);
    }
  } else if (cut.pad_multiple > 0 && (degree > 1 || cut.pad_always)) {
    CKPT_ASSIGN_OR_RETURN(uint64_t unit, CheckedMul(cut.pad_multiple, degree, "padding unit"));
    CKPT_ASSIGN_OR_RETURN(padded, CheckedMul(CeilDiv(size, unit), unit, "padded dim"));
  }
  if (padded != size && cut.parts.size() > 1) {
    return RefusePattern("dim ", cut.dim, " has both fused parts and padding");
  }
  return padded;
}

void AppendRun(DimCut& dim, Run run) {
  if (run.length == 0) return;
  if (!dim.runs.empty()) {
    Run& last = dim.runs.back();
    if (last.atom + last.length == run.atom && last.local + last.length == run.local) {
      last.length += run.length;
      return;
    }
  }
  dim.runs.push_back(run);
}

// Rank `rank` of those that `cut.widths` speak of.
Result<DimCut> CutUnevenly(const Cut& cut, uint64_t size, uint64_t rank, uint64_t degree) {
  const std::vector<uint64_t> parts = cut.parts.empty() ? std::vector{size} : cut.parts;
  if (parts.size() > kMaxPieces || cut.widths.size() % parts.size() != 0 ||
      cut.widths.size() / parts.size() != degree) {
    return RefusePattern("dim ", cut.dim, " was cut unevenly over ",
                         cut.widths.size() / parts.size(),
                         " ranks, which does not say how to cut "
                         "it over ",
                         degree);
  }
  DimCut result;
  uint64_t begin = 0;  // of the part, then of the rank's slice of it
  for (size_t p = 0; p < parts.size(); ++p) {
    const uint64_t* width = cut.widths.data() + p * degree;
    uint64_t first = begin;
    for (uint64_t r = 0; r < rank; ++r) {
      CKPT_ASSIGN_OR_RETURN(first, CheckedAdd(first, width[r], "widths"));
    }
    const uint64_t length = first >= size ? 0 : std::min(width[rank], size - first);
    AppendRun(result, Run{first, result.extent, length});
    CKPT_ASSIGN_OR_RETURN(result.extent, CheckedAdd(result.extent, width[rank], "widths"));
    uint64_t end = begin;
    for (uint64_t r = 0; r < degree; ++r) {
      CKPT_ASSIGN_OR_RETURN(end, CheckedAdd(end, width[r], "widths"));
    }
    // Only the end of a single part may be padded.
    if (end - begin < parts[p] || (end - begin > parts[p] && parts.size() > 1)) {
      return RefusePattern("the widths of part ", p, " of dim ", cut.dim, " sum to ", end - begin,
                           ", but the part is ", parts[p]);
    }
    CKPT_ASSIGN_OR_RETURN(begin, CheckedAdd(begin, parts[p], "sum of parts"));
  }
  if (begin != size) {
    return RefusePattern("the parts of dim ", cut.dim, " sum to ", begin, ", the dim is ", size);
  }
  return result;
}

// Rank `rank` of `degree` along one dim of `size`.
Result<DimCut> CutDim(const Cut& cut, uint64_t size, uint64_t rank, uint64_t degree,
                      std::optional<uint64_t> local_rows) {
  if (!cut.widths.empty() && degree > 1) return CutUnevenly(cut, size, rank, degree);
  CKPT_ASSIGN_OR_RETURN(const uint64_t padded, PaddedSize(cut, size, degree, local_rows));
  std::vector<uint64_t> parts = cut.parts;
  if (parts.size() > kMaxPieces) return RefusePattern("more than 65536 parts");
  if (parts.size() <= 1) {
    if (parts.size() == 1 && parts[0] != size) {
      return RefusePattern(
          "the only part has "
          "size ",
          parts[0], ", but dim ", cut.dim, " has size ", size);
    }
    parts.assign(1, padded);
  }
  DimCut result;
  uint64_t begin = 0;
  for (uint64_t part : parts) {
    if (part % degree != 0) {
      return RefusePattern("dim ", cut.dim, ": ", part, " does not divide by ", degree, " ranks");
    }
    const uint64_t slice = part / degree;
    if (degree > 1 && cut.unit > 1 && slice % cut.unit != 0) {
      return RefusePattern("dim ", cut.dim, ": ", degree, " ranks would cut through a unit of ",
                           cut.unit, " (a slice is ", slice, ")");
    }
    const uint64_t first = begin + rank * slice;
    const uint64_t length = first >= size ? 0 : std::min(slice, size - first);
    AppendRun(result, Run{first, result.extent, length});
    result.extent += slice;
    CKPT_ASSIGN_OR_RETURN(begin, CheckedAdd(begin, part, "sum of parts"));
  }
  if (begin != padded) {
    return RefusePattern("the parts of dim ", cut.dim, " sum to ", begin, ", the dim is ", size);
  }
  return result;
}

// The degree and rank of each cut: the grid's, the last cut fastest.
Result<std::vector<std::pair<uint64_t, uint64_t>>> PlaceOnGrid(const Pattern& pattern,
                                                               uint64_t rank, uint64_t degree) {
  std::vector<std::pair<uint64_t, uint64_t>> places(pattern.cuts.size(), {0, 1});
  if (degree == 1) return places;
  if (pattern.cuts.size() == 1 && pattern.grid.empty()) {
    places[0] = {rank, degree};
    return places;
  }
  if (pattern.grid.size() != pattern.cuts.size()) {
    return RefusePattern("several cuts need a grid of ranks, one number per cut");
  }
  uint64_t product = 1;
  for (size_t i = pattern.cuts.size(); i-- > 0;) {
    const uint64_t along = pattern.grid[i];
    if (along == 0) return RefusePattern("a grid of 0 ranks");
    CKPT_ASSIGN_OR_RETURN(product, CheckedMul(product, along, "grid"));
    places[i] = {rank % along, along};
    rank /= along;
  }
  if (product != degree) {
    return RefusePattern("cut on a grid of ", product,
                         " ranks, which does not say how to cut it "
                         "over ",
                         degree);
  }
  return places;
}

// All boxes: the runs of every dim combined.
Result<LocalTensor> Combine(const std::vector<DimCut>& dims, double scale) {
  LocalTensor local;
  uint64_t pieces = 1;
  for (const DimCut& dim : dims) {
    local.shape.push_back(dim.extent);
    CKPT_ASSIGN_OR_RETURN(pieces, CheckedMul(pieces, dim.runs.size(), "pieces"));
  }
  if (pieces > kMaxPieces) return RefusePattern("more than 65536 pieces");
  CKPT_RETURN_IF_ERROR(ElementCount(local.shape));
  const std::vector<uint64_t> strides = RowMajorStrides(local.shape);
  std::vector<size_t> at(dims.size(), 0);  // odometer, last dim fastest
  for (uint64_t k = 0; k < pieces; ++k) {
    Piece piece;
    piece.local_strides = strides;
    piece.scale = scale;
    for (size_t d = 0; d < dims.size(); ++d) {
      const Run& run = dims[d].runs[at[d]];
      piece.shape.push_back(run.length);
      piece.atom_begin.push_back(run.atom);
      piece.local_offset += run.local * strides[d];
    }
    local.pieces.push_back(std::move(piece));
    for (size_t d = dims.size(); d-- > 0;) {
      if (++at[d] < dims[d].runs.size()) break;
      at[d] = 0;
    }
  }
  return local;
}

Result<LocalTensor> Make(const Pattern& pattern, const Shape& atom, uint64_t rank, uint64_t degree,
                         std::optional<uint64_t> local_rows) {
  CKPT_CHECK(rank < degree);
  CKPT_RETURN_IF_ERROR(ElementCount(atom));
  if (pattern.kind == PatternKind::kUnknown && degree > 1) {
    return RefusePattern("no rule says how it is spread over ", degree, " ranks");
  }
  std::vector<DimCut> dims;
  dims.reserve(atom.size());
  for (uint64_t size : atom) dims.push_back(WholeDim(size));
  if (pattern.kind == PatternKind::kShard) {
    if (pattern.cuts.empty()) return RefusePattern("a shard pattern without a cut");
    CKPT_ASSIGN_OR_RETURN(const auto places, PlaceOnGrid(pattern, rank, degree));
    std::vector<bool> seen(atom.size(), false);
    for (size_t i = 0; i < pattern.cuts.size(); ++i) {
      const Cut& cut = pattern.cuts[i];
      if (cut.dim >= atom.size()) {
        return RefusePattern("cuts dim ", cut.dim, ", which is not in shape ", ShapeToString(atom));
      }
      if (seen[cut.dim]) return RefusePattern("cuts dim ", cut.dim, " twice");
      seen[cut.dim] = true;
      CKPT_ASSIGN_OR_RETURN(
          dims[cut.dim], CutDim(cut, atom[cut.dim], places[i].first, places[i].second, local_rows));
    }
  }
  return Combine(dims, pattern.bias_scaled ? 1.0 / static_cast<double>(degree) : 1.0);
}

}  // namespace

std::string PatternName(const Pattern& pattern) {
  switch (pattern.kind) {
    case PatternKind::kUnknown: return "unknown";
    case PatternKind::kUnique: return "unique";
    case PatternKind::kReplicate: return "replicate";
    case PatternKind::kPartial: return "partial";
    case PatternKind::kShard: break;
  }
  if (pattern.cuts.size() > 1) return "shard-hy";
  if (pattern.cuts.empty()) return "unknown";
  if (pattern.cuts[0].parts.size() > 1) return "shard-nc";
  return pattern.cuts[0].dim == 0 ? "shard-v" : "shard-h";
}

Result<LocalTensor> MakeLocal(const Pattern& pattern, const Shape& atom, uint64_t rank,
                              uint64_t degree) {
  return Make(pattern, atom, rank, degree, std::nullopt);
}

Result<LocalTensor> MakeLocalWithRows(const Pattern& pattern, const Shape& atom, uint64_t rank,
                                      uint64_t degree, uint64_t local_rows) {
  if (pattern.kind == PatternKind::kShard) {
    if (pattern.cuts.size() != 1)
      return RefusePattern("a pattern of several cuts does not have one count of rows");
    return Make(pattern, atom, rank, degree, local_rows);
  }
  if (atom.empty() || atom[0] != local_rows) {
    return RefusePattern(PatternName(pattern), ": ", local_rows, " rows, but the shape is ",
                         ShapeToString(atom));
  }
  return Make(pattern, atom, rank, degree, std::nullopt);
}

}  // namespace ckptfs
