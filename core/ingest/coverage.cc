// SPDX-License-Identifier: Apache-2.0

#include "core/ingest/coverage.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "core/base/strings.h"
#include "core/ingest/assembler.h"

namespace ckptfs {
namespace {

// The proof has three parts, and needs all of them.  Fragments of a local tensor do not
// overlap: no element that a rank held is stored twice.  Boxes of local tensors in the atom
// are disjoint and as large together as the atom: so they tile it.  What no fragment holds
// of a local tensor no box shows: it is padding.
//
// A checkpoint says how many fragments and boxes there are, and may lie: the time depends on
// series, of which a trillion parameters have few, and on boxes by a sort.  What cannot be
// proven so is done one by one, up to the limits here, and refused beyond them.

using Defect = std::optional<CoverageDefect>;

// Series with gaps are expanded only up to this many fragments in one proof.
constexpr uint64_t kMaxExpanded = uint64_t{1} << 24;
// Boxes that one sweep cannot tell apart are compared with each other, so often at most:
// some seconds.
constexpr uint64_t kMaxCompared = uint64_t{1} << 31;

// Elements [begin, end) of a local tensor that no fragment holds, and the blobs beside it.
struct Hole {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<uint32_t> blobs;
};

uint64_t LastBegin(const FragmentSeries& s) { return s.flat_begin + (s.count - 1) * s.flat_step; }
uint64_t LastEnd(const FragmentSeries& s) { return LastBegin(s) + s.elements; }
uint32_t LastBlob(const FragmentSeries& s) {
  return static_cast<uint32_t>(s.At(s.count - 1).blob);
}

// ---- order and bounds of the series ----------------------------------------

// All that follows computes LastEnd and the like without a check: that no sum of a series
// overflows is shown here, by divisions.
Defect CheckOneSeries(const FragmentSeries& s, const std::vector<uint64_t>& sizes) {
  if (s.local >= sizes.size()) {
    return CoverageDefect{StrCat("a fragment names local tensor ", s.local, " of ", sizes.size()),
                          {s.blob}};
  }
  const uint64_t size = sizes[s.local];
  const bool shape_ok = s.count > 0 && s.elements > 0 && s.elements <= size &&
                        s.flat_begin <= size - s.elements &&
                        (s.count == 1 || s.flat_step >= s.elements);
  const bool fits = shape_ok && (s.count == 1 ||
                                 s.flat_step <= (size - s.elements - s.flat_begin) / (s.count - 1));
  if (!fits) {
    return CoverageDefect{StrCat("elements from ", s.flat_begin, " on leave the ", size,
                                 " elements of local tensor ", s.local),
                          {s.blob}};
  }
  return std::nullopt;
}

// Neighbours suffice: where each series begins behind the end of the one before it, no two
// overlap.  Interleaved ones fail; NormaliseSeries has untangled them.
Defect CheckOrder(const FragmentSeries& a, const FragmentSeries& b) {
  if (b.local > a.local) return std::nullopt;
  if (b.local < a.local || b.flat_begin < a.flat_begin) {
    return CoverageDefect{"the series are not in order", {a.blob, b.blob}};
  }
  if (b.flat_begin < LastEnd(a)) {
    return CoverageDefect{StrCat("elements [", b.flat_begin, ", ",
                                 std::min(LastEnd(a), LastEnd(b)), ") of local tensor ", a.local,
                                 " are stored twice"),
                          {LastBlob(a), b.blob}};
  }
  return std::nullopt;
}

Defect CheckSeries(const Gather& gather, const std::vector<uint64_t>& sizes) {
  for (size_t i = 0; i < gather.series.size(); ++i) {
    if (Defect defect = CheckOneSeries(gather.series[i], sizes)) return defect;
    if (i == 0) continue;
    if (Defect defect = CheckOrder(gather.series[i - 1], gather.series[i])) return defect;
  }
  return std::nullopt;
}

// ---- what no fragment holds -------------------------------------------------

// Fragments come in order and do not overlap, so that what is covered is one stretch with
// holes in it: of each fragment only its end is kept, those that touch become one, and a
// dense series, however many fragments it has, is a single step.
class HoleFinder {
 public:
  explicit HoleFinder(uint64_t size) : size_(size) {}

  // In order.  False: too many fragments to expand.
  bool Cover(const FragmentSeries& s) {
    const bool dense = s.count == 1 || s.flat_step == s.elements;
    if (dense) {
      Note(s.flat_begin, s.blob);
      Advance(LastEnd(s), LastBlob(s));
      return true;
    }
    if ((expanded_ += s.count) > kMaxExpanded) return false;
    for (uint32_t k = 0; k < s.count; ++k) {
      const Fragment fragment = s.At(k);
      Note(fragment.flat_begin, static_cast<uint32_t>(fragment.blob));
      Advance(fragment.flat_end, static_cast<uint32_t>(fragment.blob));
    }
    return true;
  }

  std::vector<Hole> Finish() {
    if (covered_ < size_) Note(size_, last_);
    return std::move(holes_);
  }

 private:
  void Note(uint64_t begin, std::optional<uint32_t> blob) {
    if (begin <= covered_) return;
    Hole hole{covered_, begin, {}};
    if (last_) hole.blobs.push_back(*last_);
    if (blob && blob != last_) hole.blobs.push_back(*blob);
    holes_.push_back(std::move(hole));
  }
  void Advance(uint64_t end, uint32_t blob) {
    covered_ = end;
    last_ = blob;
  }

  uint64_t size_;
  uint64_t covered_ = 0;
  uint64_t expanded_ = 0;
  std::optional<uint32_t> last_;
  std::vector<Hole> holes_;
};

// Last element of the image of dims [dim, end) beyond its first.
uint64_t ImageSpan(const Piece& piece, size_t dim) {
  uint64_t span = 0;
  for (; dim < piece.shape.size(); ++dim) span += (piece.shape[dim] - 1) * piece.local_strides[dim];
  return span;
}

// True if an element of the image lies in [begin, end).  Recurses over at most
// kMaxDimensions dims and only into slices that straddle a border.
bool Touches(const Piece& piece, size_t dim, uint64_t base, uint64_t begin, uint64_t end) {
  if (base >= end || base + ImageSpan(piece, dim) < begin) return false;
  if (dim == piece.shape.size()) return true;
  const uint64_t inner = ImageSpan(piece, dim + 1);
  const uint64_t stride = piece.local_strides[dim];
  uint64_t first = 0;
  uint64_t last = piece.shape[dim] - 1;
  if (stride > 0) {
    if (begin > base + inner) first = (begin - base - inner + stride - 1) / stride;
    last = std::min(last, (end - 1 - base) / stride);
  } else {
    last = 0;
  }
  for (uint64_t i = first; i <= last; ++i) {
    const uint64_t at = base + i * stride;
    if (at >= begin && at < end) return true;
    if (Touches(piece, dim + 1, at, begin, end)) return true;
  }
  return false;
}

// A hole is not a defect by itself: ZeRO pads what ranks hold, and need not store it.  It is one
// where a piece maps an element of it to the atom.
Defect CheckHoles(const Gather& gather, const std::vector<uint64_t>& sizes) {
  size_t next = 0;
  for (size_t local = 0; local < gather.locals.size(); ++local) {
    HoleFinder finder(sizes[local]);
    for (; next < gather.series.size() && gather.series[next].local == local; ++next) {
      if (!finder.Cover(gather.series[next])) {
        return CoverageDefect{"more than 2^24 separate fragments", {gather.series[next].blob}};
      }
    }
    for (Hole& hole : finder.Finish()) {
      for (const Piece& piece : gather.locals[local].pieces) {
        const bool empty = std::find(piece.shape.begin(), piece.shape.end(), 0) != piece.shape.end();
        if (empty || !Touches(piece, 0, piece.local_offset, hole.begin, hole.end)) continue;
        return CoverageDefect{StrCat("elements [", hole.begin, ", ", hole.end,
                                     ") of local tensor ", local, " are in no file"),
                              std::move(hole.blobs)};
      }
    }
  }
  return std::nullopt;
}

// ---- the boxes in the atom ---------------------------------------------------

struct Box {
  const Piece* piece = nullptr;
  size_t local = 0;
};

bool Overlap(const Piece& a, const Piece& b) {
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (a.atom_begin[d] + a.shape[d] <= b.atom_begin[d]) return false;
    if (b.atom_begin[d] + b.shape[d] <= a.atom_begin[d]) return false;
  }
  return true;
}

// The dim along which a sweep separates most boxes.
size_t SweepDim(const std::vector<Box>& boxes, size_t rank) {
  size_t best = 0;
  size_t most = 0;
  for (size_t d = 0; d < rank; ++d) {
    std::vector<uint64_t> begins;
    begins.reserve(boxes.size());
    for (const Box& box : boxes) begins.push_back(box.piece->atom_begin[d]);
    std::sort(begins.begin(), begins.end());
    const size_t distinct = static_cast<size_t>(
        std::unique(begins.begin(), begins.end()) - begins.begin());
    if (distinct > most) std::tie(best, most) = std::pair(d, distinct);
  }
  return best;
}

// Boxes that are disjoint and have the atom's volume together cover it, since each lies inside
// (ValidateLocal): no union has to be computed.  Two boxes can overlap only where they do
// along the sweep's dim, so that sorted boxes are compared with few others.
Defect CheckBoxes(const Gather& gather, const Shape& atom, uint64_t total) {
  std::vector<Box> boxes;
  uint64_t volume = 0;
  for (size_t local = 0; local < gather.locals.size(); ++local) {
    for (const Piece& piece : gather.locals[local].pieces) {
      const auto count = ElementCount(piece.shape);
      if (!count || *count > total) return CoverageDefect{"a box is larger than the atom", {}};
      if (*count == 0) continue;
      volume = volume > total ? volume : volume + *count;
      boxes.push_back(Box{&piece, local});
    }
  }
  if (!atom.empty() && boxes.size() > 1) {
    const size_t dim = SweepDim(boxes, atom.size());
    std::sort(boxes.begin(), boxes.end(), [dim](const Box& a, const Box& b) {
      return a.piece->atom_begin[dim] < b.piece->atom_begin[dim];
    });
    uint64_t compared = 0;
    for (size_t i = 0; i < boxes.size(); ++i) {
      const uint64_t end = boxes[i].piece->atom_begin[dim] + boxes[i].piece->shape[dim];
      for (size_t j = i + 1; j < boxes.size() && boxes[j].piece->atom_begin[dim] < end; ++j) {
        if (++compared > kMaxCompared) {
          return CoverageDefect{StrCat(boxes.size(), " boxes of a form that takes too long to prove"),
                                {}};
        }
        if (!Overlap(*boxes[i].piece, *boxes[j].piece)) continue;
        return CoverageDefect{StrCat("local tensors ", boxes[i].local, " and ", boxes[j].local,
                                     " both hold the elements from ",
                                     ShapeToString(boxes[j].piece->atom_begin), " on"),
                              {}};
      }
    }
  }
  if (volume != total) {
    return CoverageDefect{StrCat("the local tensors hold ", volume, " of the ", total,
                                 " elements of shape ", ShapeToString(atom)),
                          {}};
  }
  return std::nullopt;
}

bool Joins(const FragmentSeries& a, const FragmentSeries& b) {
  return a.local == b.local && a.elements == b.elements && a.dtype == b.dtype &&
         uint64_t{a.count} + b.count <= std::numeric_limits<uint32_t>::max();
}

// Appends every fragment of b (all of the same step as a) if they continue a.
bool JoinSeries(FragmentSeries& a, const FragmentSeries& b) {
  if (!Joins(a, b)) return false;
  if (b.count > 1 && a.count > 1 &&
      std::tie(a.flat_step, a.blob_step, a.offset_step) !=
          std::tie(b.flat_step, b.blob_step, b.offset_step)) {
    return false;
  }
  FragmentSeries joined = a;
  if (!ExtendSeries(joined, b.local, b.At(0))) return false;
  if (b.count > 1 && std::tie(joined.flat_step, joined.blob_step, joined.offset_step) !=
                         std::tie(b.flat_step, b.blob_step, b.offset_step)) {
    return false;
  }
  joined.count = a.count + b.count;
  a = joined;
  return true;
}

bool ByPlace(const FragmentSeries& a, const FragmentSeries& b) {
  return std::tie(a.local, a.flat_begin) < std::tie(b.local, b.flat_begin);
}

}  // namespace

bool ExtendSeries(FragmentSeries& s, uint32_t local, const Fragment& f) {
  if (s.local != local || s.dtype != f.dtype || s.elements != f.flat_end - f.flat_begin ||
      s.count == std::numeric_limits<uint32_t>::max()) {
    return false;
  }
  if (f.flat_begin < LastEnd(s)) return false;
  const uint64_t flat_step = f.flat_begin - LastBegin(s);
  const Fragment last = s.At(s.count - 1);
  const int64_t blob_step =
      static_cast<int64_t>(static_cast<uint32_t>(f.blob)) - static_cast<uint32_t>(last.blob);
  const int64_t offset_step = static_cast<int64_t>(f.offset - last.offset);
  if (s.count == 1) {
    s.flat_step = flat_step;
    s.blob_step = blob_step;
    s.offset_step = offset_step;
  } else if (flat_step != s.flat_step || blob_step != s.blob_step ||
             offset_step != s.offset_step) {
    return false;
  }
  ++s.count;
  return true;
}

// Fragments come in as files are read, rank by rank; a manifest, a proof and each read take
// time per series.  Those of several ranks may interleave (every second row is another's):
// expanded and sorted they join into what a reader meets from the first element on.
void NormaliseSeries(std::vector<FragmentSeries>& series) {
  std::stable_sort(series.begin(), series.end(), ByPlace);
  bool tangled = false;
  for (size_t i = 1; i < series.size(); ++i) {
    tangled |= series[i].local == series[i - 1].local &&
               series[i].flat_begin < LastEnd(series[i - 1]) && series[i - 1].count > 1;
  }
  if (tangled) {
    std::vector<FragmentSeries> single;
    for (const FragmentSeries& s : series) {
      for (uint32_t k = 0; k < s.count; ++k) {
        const Fragment f = s.At(k);
        single.push_back(FragmentSeries{s.local, 1, f.flat_begin, 0, s.elements,
                                        static_cast<uint32_t>(f.blob), 0, f.offset, 0, f.dtype});
      }
    }
    std::stable_sort(single.begin(), single.end(), ByPlace);
    series = std::move(single);
  }
  std::vector<FragmentSeries> joined;
  for (const FragmentSeries& s : series) {
    if (joined.empty() || !JoinSeries(joined.back(), s)) joined.push_back(s);
  }
  joined.shrink_to_fit();
  series = std::move(joined);
}

std::optional<CoverageDefect> FindCoverageDefect(const Gather& gather, const Shape& atom) {
  const auto total = ElementCount(atom);
  if (!total) return CoverageDefect{total.error().message, {}};
  std::vector<uint64_t> sizes;
  sizes.reserve(gather.locals.size());
  for (const LocalTensor& local : gather.locals) {
    if (Status valid = ValidateLocal(local, atom); !valid) {
      return CoverageDefect{valid.error().message, {}};
    }
    sizes.push_back(*ElementCount(local.shape));
  }
  if (Defect defect = CheckSeries(gather, sizes)) return defect;
  if (Defect defect = CheckBoxes(gather, atom, *total)) return defect;
  return CheckHoles(gather, sizes);
}

Status ProveCoverage(const Gather& gather, const Shape& atom) {
  if (auto defect = FindCoverageDefect(gather, atom)) {
    return Fail(ErrorCode::kInvalid, std::move(defect->rule));
  }
  return {};
}

}  // namespace ckptfs
