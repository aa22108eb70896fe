// SPDX-License-Identifier: Apache-2.0

#include "core/state/coverage.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "core/base/strings.h"
#include "core/state/assembler.h"
#include "core/state/tiling.h"

namespace ckptfs {
namespace {

// The proof has three parts, and needs all of them.  Fragments of a local tensor do not
// overlap: no element that a rank held is stored twice.  Boxes of local tensors in the atom
// are disjoint and as large together as the atom: so they tile it.  No box shows a part of a
// local tensor that no fragment holds: it is padding.
//
// A checkpoint says how many fragments and boxes there are, and may lie.  So the time depends
// on series, of which a trillion parameters have few, and on boxes by a sort (tiling.h).  The
// rest is proven one by one, within the budget of its file, and refused beyond it.

using Defect = std::optional<CoverageDefect>;

CoverageDefect TooLong(std::string what) {
  return CoverageDefect{StrCat(what, ": proving what this file's tensors cover takes too long"),
                        {}};
}

uint64_t LastBegin(const FragmentSeries& s) { return s.flat_begin + (s.count - 1) * s.flat_step; }
uint64_t LastEnd(const FragmentSeries& s) { return LastBegin(s) + s.elements; }
uint32_t LastBlob(const FragmentSeries& s) { return static_cast<uint32_t>(s.At(s.count - 1).blob); }

// ---- order and bounds of the series ----------------------------------------

// All that follows computes LastEnd and the like without a check: that no sum of a series
// overflows is shown here, by divisions.
Defect CheckOneSeries(const FragmentSeries& s, const std::vector<uint64_t>& sizes) {
  if (s.local >= sizes.size()) {
    return CoverageDefect{StrCat("a fragment names local tensor ", s.local,
                                 ", but there "
                                 "are ",
                                 sizes.size()),
                          {s.blob}};
  }
  const uint64_t size = sizes[s.local];
  const bool shape_ok = s.count > 0 && s.elements > 0 && s.elements <= size &&
                        s.flat_begin <= size - s.elements &&
                        (s.count == 1 || s.flat_step >= s.elements);
  const bool fits = shape_ok && (s.count == 1 ||
                                 s.flat_step <= (size - s.elements - s.flat_begin) / (s.count - 1));
  if (!fits) {
    return CoverageDefect{StrCat("elements from ", s.flat_begin, " on lie beyond the ", size,
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
    return CoverageDefect{StrCat("elements [", b.flat_begin, ", ", std::min(LastEnd(a), LastEnd(b)),
                                 ") of local tensor ", a.local, " are stored twice"),
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

// Elements [begin, end) of a local tensor that no fragment holds, and the blobs beside it.
struct Hole {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::optional<uint32_t> before;
  std::optional<uint32_t> after;
};

// The images of a local tensor's pieces: who asks for those that touch a hole looks at few.
class Images {
 public:
  explicit Images(const LocalTensor& local) {
    for (const Piece& piece : local.pieces) {
      if (std::find(piece.shape.begin(), piece.shape.end(), 0) != piece.shape.end()) continue;
      images_.push_back(Image{&piece, SpansOf(piece), 0});
    }
    std::sort(images_.begin(), images_.end(), [](const Image& a, const Image& b) {
      return a.piece->local_offset < b.piece->local_offset;
    });
    uint64_t reach = 0;
    for (Image& image : images_) {
      reach = std::max(reach, image.piece->local_offset + image.spans[0]);
      image.reach = reach;
    }
  }

  // True if a piece maps an element of the hole to the atom; nothing if the budget is spent.
  std::optional<bool> Touch(const Hole& hole, ProofBudget& budget) const {
    const auto first =
        std::partition_point(images_.begin(), images_.end(),
                             [&](const Image& image) { return image.reach < hole.begin; });
    for (auto at = first; at != images_.end() && at->piece->local_offset < hole.end; ++at) {
      const bool touches = Touches(*at, 0, at->piece->local_offset, hole, budget);
      if (!budget.Spend(1)) return std::nullopt;
      if (touches) return true;
    }
    return false;
  }

 private:
  struct Image {
    const Piece* piece = nullptr;
    std::vector<uint64_t> spans;  // of dims [d, rank): its last element's distance to its first
    uint64_t reach = 0;           // the last element of this image and of those before it
  };

  static std::vector<uint64_t> SpansOf(const Piece& piece) {
    std::vector<uint64_t> spans(piece.shape.size() + 1, 0);
    for (size_t d = piece.shape.size(); d-- > 0;) {
      spans[d] = spans[d + 1] + (piece.shape[d] - 1) * piece.local_strides[d];
    }
    return spans;
  }

  // True if an element of the image lies in the hole.  Recurses over at most kMaxDimensions dims
  // and only into slices that straddle a border; false if the budget is spent.
  static bool Touches(const Image& image, size_t dim, uint64_t base, const Hole& hole,
                      ProofBudget& budget) {
    const Piece& piece = *image.piece;
    if (base >= hole.end || base + image.spans[dim] < hole.begin || !budget.Spend(1)) return false;
    if (dim == piece.shape.size()) return true;
    const uint64_t inner = image.spans[dim + 1];
    const uint64_t stride = piece.local_strides[dim];
    uint64_t first = 0;
    uint64_t last = stride > 0 ? piece.shape[dim] - 1 : 0;
    if (stride > 0) {
      if (hole.begin > base + inner) first = (hole.begin - base - inner + stride - 1) / stride;
      last = std::min(last, (hole.end - 1 - base) / stride);
    }
    for (uint64_t i = first; i <= last; ++i) {
      const uint64_t at = base + i * stride;
      if (at >= hole.begin && at < hole.end) return true;
      if (Touches(image, dim + 1, at, hole, budget)) return true;
      if (budget.spent()) return false;
    }
    return false;
  }

  std::vector<Image> images_;  // by their first element
};

// Fragments come in order and do not overlap, so that what is covered is one stretch with
// holes in it: of each fragment only its end is kept, those that touch become one, and a
// dense series, however many fragments it has, is a single step.
//
// A hole is not a defect by itself: ZeRO pads what ranks hold, and need not store it.  It is one
// where a piece maps an element of it to the atom.
class HoleCheck {
 public:
  HoleCheck(const LocalTensor& local, size_t number, ProofBudget& budget)
      : local_(local), number_(number), budget_(budget) {}

  // In order.
  Defect Cover(const FragmentSeries& s) {
    if (s.count == 1 || s.flat_step == s.elements) {
      return Note(s.flat_begin, LastEnd(s), s.blob, LastBlob(s));
    }
    for (uint32_t k = 0; k < s.count; ++k) {
      if (!budget_.Spend(1)) return TooLong(StrCat(s.count, " fragments with gaps between them"));
      const Fragment fragment = s.At(k);
      const auto blob = static_cast<uint32_t>(fragment.blob);
      if (Defect defect = Note(fragment.flat_begin, fragment.flat_end, blob, blob)) return defect;
    }
    return std::nullopt;
  }
  Defect Finish(uint64_t size) { return Note(size, size, std::nullopt, std::nullopt); }

 private:
  Defect Note(uint64_t begin, uint64_t end, std::optional<uint32_t> blob,
              std::optional<uint32_t> last) {
    const Hole hole{covered_, begin, last_, blob};
    covered_ = end;
    last_ = last;
    if (hole.begin >= hole.end) return std::nullopt;
    if (!images_) images_.emplace(local_);
    const auto touched = images_->Touch(hole, budget_);
    if (!touched) return TooLong(StrCat("the pieces of local tensor ", number_));
    if (!*touched) return std::nullopt;
    CoverageDefect defect{StrCat("elements [", hole.begin, ", ", hole.end, ") of local tensor ",
                                 number_, " are in no file"),
                          {}};
    if (hole.before) defect.blobs.push_back(*hole.before);
    if (hole.after && hole.after != hole.before) defect.blobs.push_back(*hole.after);
    return defect;
  }

  const LocalTensor& local_;
  std::optional<Images> images_;  // made at the first hole: mostly there is none
  const size_t number_;
  ProofBudget& budget_;
  uint64_t covered_ = 0;
  std::optional<uint32_t> last_;
};

Defect CheckHoles(const Gather& gather, const std::vector<uint64_t>& sizes, ProofBudget& budget) {
  size_t next = 0;
  for (size_t local = 0; local < gather.locals.size(); ++local) {
    HoleCheck check(gather.locals[local], local, budget);
    for (; next < gather.series.size() && gather.series[next].local == local; ++next) {
      if (Defect defect = check.Cover(gather.series[next])) return defect;
    }
    if (Defect defect = check.Finish(sizes[local])) return defect;
  }
  return std::nullopt;
}

// ---- the boxes in the atom ---------------------------------------------------

// Boxes that are disjoint and have the atom's volume together cover it, since each lies inside
// (ValidateLocal).
Defect CheckBoxes(const Gather& gather, const Shape& atom, uint64_t total) {
  std::vector<LocalBox> boxes;
  uint64_t volume = 0;
  for (size_t local = 0; local < gather.locals.size(); ++local) {
    for (const Piece& piece : gather.locals[local].pieces) {
      const auto count = ElementCount(piece.shape);
      if (!count || *count > total) return CoverageDefect{"a box is larger than the atom", {}};
      if (*count == 0) continue;
      volume = volume > total ? volume : volume + *count;
      boxes.push_back(LocalBox{&piece, local});
    }
  }
  const size_t many = boxes.size();
  const TilingReport judged = JudgeTiling(std::move(boxes), atom);
  if (judged.tiling == Tiling::kOverlaps) {
    const auto& [a, b] = judged.overlap;
    return CoverageDefect{
        StrCat("local tensors ", a.local, " and ", b.local, " both hold the elements from ",
               ShapeToString(b.piece->atom_begin), " on"),
        {}};
  }
  if (volume != total) {
    return CoverageDefect{StrCat("the local tensors hold ", volume, " of the ", total,
                                 " elements of shape ", ShapeToString(atom)),
                          {}};
  }
  if (judged.tiling == Tiling::kNot) {
    return CoverageDefect{StrCat("the ", many,
                                 " boxes of its local tensors overlap, and leave as "
                                 "many elements of shape ",
                                 ShapeToString(atom), " uncovered"),
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
  } else if (flat_step != s.flat_step || blob_step != s.blob_step || offset_step != s.offset_step) {
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

std::optional<CoverageDefect> FindCoverageDefect(const Gather& gather, const Shape& atom,
                                                 ProofBudget& budget) {
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
  return CheckHoles(gather, sizes, budget);
}

Status ProveCoverage(const Gather& gather, const Shape& atom, ProofBudget& budget) {
  if (auto defect = FindCoverageDefect(gather, atom, budget)) {
    return Fail(ErrorCode::kInvalid, std::move(defect->rule));
  }
  return {};
}

Status ProveCoverage(const Gather& gather, const Shape& atom) {
  ProofBudget budget;
  return ProveCoverage(gather, atom, budget);
}

}  // namespace ckptfs
