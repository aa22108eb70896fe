// SPDX-License-Identifier: Apache-2.0

#include "core/view/atom_segment.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/view/atom_reader.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxElementBytes = 16;
// Elements explained at a time, which bounds the memory.
constexpr uint64_t kExplainBlock = 1 << 16;

// No two indexes of a box may name the same element of a target.
Status ValidateTarget(const LocalTensor& local) {
  for (const Piece& piece : local.pieces) {
    for (size_t d = 0; d < piece.shape.size(); ++d) {
      if (piece.shape[d] > 1 && piece.local_strides[d] == 0) {
        return Refuse("a target piece has stride 0");
      }
    }
  }
  return {};
}

// Sub-byte values are shown whole and as stored.
Status ValidateSubByte(const AtomSegment& body, const Atom& atom) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  if (body.dtype != atom.dtype || body.flat_begin != 0 || body.flat_end != elements ||
      *body.local != WholeTensor(atom.shape)) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("values of type ", DTypeName(atom.dtype), " can only be shown whole"));
  }
  return {};
}

// Bytes [begin, end) of a segment, counted from its start, into `out`.
struct AtomFiller {
  const AtomSegment& body;
  const StepModel& model;
  BlobReader& blobs;
  uint64_t begin;
  std::byte* out;

  // Bytes [from, to), all in one element.
  Status PartOfElement(uint64_t element, uint64_t from, uint64_t to) const {
    std::array<std::byte, kMaxElementBytes> whole;
    const uint64_t flat = body.flat_begin + element;
    CKPT_RETURN_IF_ERROR(ReadAtom(model, blobs, body, flat, flat + 1, whole.data()));
    std::memcpy(out + (from - begin), whole.data() + (from - element * ByteWidth(body.dtype)),
                to - from);
    return {};
  }
};

// Finds the origins of a segment's elements.
class AtomExplainer {
 public:
  AtomExplainer(const AtomSegment& body, uint64_t start, const StoredAtom& stored,
                std::vector<Origin>& origins)
      : body_(body), start_(start), stored_(stored), out_(origins) {}

  void Block(uint64_t from, uint64_t to);

 private:
  void Collect(const SourceRun& run, std::vector<Origin>& found) const;
  uint64_t ByteOf(uint64_t flat) const {
    return start_ + (flat - body_.flat_begin) * ByteWidth(body_.dtype);
  }

  const AtomSegment& body_;
  const uint64_t start_;
  const StoredAtom& stored_;
  std::vector<Origin>& out_;
};

// One origin per run, or per element where a side is strided.
void AtomExplainer::Collect(const SourceRun& run, std::vector<Origin>& found) const {
  const bool dense = run.count == 1 || (run.target_stride == 1 && run.source_stride == 1);
  const uint64_t width = ByteWidth(run.stored);
  const uint64_t step = dense ? run.count : 1;
  for (uint64_t i = 0; i < run.count; i += step) {
    Origin origin;
    origin.kind = Origin::Kind::kBlob;
    origin.begin = ByteOf(run.target + i * run.target_stride);
    origin.end = origin.begin + step * ByteWidth(body_.dtype);
    origin.blob = run.blob;
    origin.blob_offset = run.offset + i * run.source_stride * width;
    origin.blob_length = step * width;
    origin.atom = stored_.index;
    origin.stored = run.stored;
    origin.shown = body_.dtype;
    found.push_back(origin);
  }
}

void AtomExplainer::Block(uint64_t from, uint64_t to) {
  std::vector<Origin> found;
  for (const Gather& gather : GathersRead(stored_.atom->source)) {
    (void)ForEachSourceRun(gather, *body_.local, from, to, [&](const SourceRun& run) {
      Collect(run, found);
      return true;
    });
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Origin& a, const Origin& b) { return a.begin < b.begin; });
  uint64_t now = ByteOf(from);
  const auto zeros_to = [&](uint64_t end) {
    Origin zero;
    zero.kind = Origin::Kind::kZero;
    zero.begin = now;
    zero.end = end;
    if (now < end) AppendOrigin(out_, zero);
    now = std::max(now, end);
  };
  for (const Origin& origin : found) {
    zeros_to(origin.begin);
    AppendOrigin(out_, origin);
    now = std::max(now, origin.end);
  }
  zeros_to(ByteOf(to));
}

}  // namespace

Status ValidateAtomSegment(const AtomSegment& body, uint64_t length, const StepModel& model) {
  if (static_cast<uint32_t>(body.atom) >= model.atoms.size()) return Refuse("no such atom");
  if (body.local == nullptr) return Refuse("an atom segment without a local tensor");
  const Atom& atom = model.atom(body.atom);
  CKPT_RETURN_IF_ERROR(ValidateLocal(*body.local, atom.shape));
  CKPT_RETURN_IF_ERROR(ValidateTarget(*body.local));
  if (body.flat_begin > body.flat_end ||
      SegmentBytes(body.flat_end - body.flat_begin, body.dtype) != length) {
    return Refuse("an atom segment's range does not have the segment's length");
  }
  if (ByteWidth(atom.dtype) == 0 || ByteWidth(body.dtype) == 0) return ValidateSubByte(body, atom);
  CKPT_ASSIGN_OR_RETURN(const StoredAtom stored, FindStoredAtom(model, body.atom, body.dtype));
  return stored.MakeConversion(stored.atom->dtype, 1.0).map([](const Conversion&) {});
}

Status ReadAtomSegment(const AtomSegment& body, const StepModel& model, BlobReader& blobs,
                       uint64_t begin, uint64_t end, std::byte* out) {
  const uint64_t width = ByteWidth(body.dtype);
  if (width == 0) return ReadPackedAtom(model, blobs, body, begin, end, out);
  const AtomFiller filler{body, model, blobs, begin, out};
  const uint64_t whole_begin = (begin + width - 1) / width;
  const uint64_t whole_end = end / width;
  if (whole_begin > whole_end) return filler.PartOfElement(whole_end, begin, end);
  if (begin < whole_begin * width) {
    CKPT_RETURN_IF_ERROR(filler.PartOfElement(whole_begin - 1, begin, whole_begin * width));
  }
  if (whole_begin < whole_end) {
    CKPT_RETURN_IF_ERROR(ReadAtom(model, blobs, body, body.flat_begin + whole_begin,
                                  body.flat_begin + whole_end,
                                  out + (whole_begin * width - begin)));
  }
  if (whole_end * width < end) return filler.PartOfElement(whole_end, whole_end * width, end);
  return {};
}

bool LendAtomSegment(const AtomSegment& body, const StepModel& model, uint64_t begin, uint64_t end,
                     Lender& lender) {
  const uint64_t width = ByteWidth(body.dtype);
  if (width == 0 || begin % width != 0 || end % width != 0) return false;
  const auto stored = FindStoredAtom(model, body.atom, body.dtype);
  if (!stored) return false;
  const Gather* copied = GatherCopied(stored->atom->source);
  if (copied == nullptr) return false;
  const uint64_t first = body.flat_begin + begin / width;
  const uint64_t last = body.flat_begin + end / width;
  std::vector<SourceRun> runs;
  const RunsEnd how =
      ForEachSourceRun(*copied, *body.local, first, last, [&](const SourceRun& run) {
        const bool dense = run.count == 1 || (run.target_stride == 1 && run.source_stride == 1);
        if (!dense || runs.size() == Lender::kMaxStretches) return false;
        const auto conversion = stored->MakeConversion(run.stored, run.factor);
        runs.push_back(run);
        return conversion && conversion->is_copy();
      });
  if (how != RunsEnd::kDone) return false;
  std::ranges::sort(runs, {}, &SourceRun::target);
  uint64_t next = first;
  for (const SourceRun& run : runs) {
    if (run.target != next || !lender.Add(run.blob, run.offset, run.count * width)) return false;
    next += run.count;
  }
  return next == last;  // elements that no piece maps are zeros
}

void VisitAtomSources(const AtomSegment& body, const StepModel& model, uint64_t begin, uint64_t end,
                      SourceVisitor& visitor) {
  const uint64_t width = ByteWidth(body.dtype);
  const auto stored = FindStoredAtom(model, body.atom, body.dtype);
  if (width == 0 || !stored) return;
  for (const Gather& gather : GathersRead(stored->atom->source)) {
    const RunsEnd how = ForEachSourceRun(
        gather, *body.local, body.flat_begin + begin / width, body.flat_begin + CeilDiv(end, width),
        [&](const SourceRun& run) {
          const auto extent = ExtentOf(run.count, run.source_stride, ByteWidth(run.stored));
          return extent && visitor.Visit(run.blob, run.offset, *extent);
        });
    if (how != RunsEnd::kDone) return;
  }
}

Status ExplainAtomSegment(const AtomSegment& body, uint64_t start, const StepModel& model,
                          uint64_t begin, uint64_t end, size_t limit,
                          std::vector<Origin>& origins) {
  const uint64_t width = ByteWidth(body.dtype);
  if (width == 0) return Fail(ErrorCode::kUnsupported, "sub-byte values are not explained");
  CKPT_ASSIGN_OR_RETURN(const StoredAtom stored, FindStoredAtom(model, body.atom, body.dtype));
  if (!IsStoredInFiles(stored.atom->source)) {
    Origin origin;
    origin.begin = begin;
    origin.end = end;
    origin.kind = Origin::Kind::kInline;
    origin.atom = body.atom;
    origin.stored = stored.atom->dtype;
    origin.shown = body.dtype;
    AppendOrigin(origins, origin);
    return {};
  }
  AtomExplainer explainer(body, start, stored, origins);
  const uint64_t from = body.flat_begin + (begin - start) / width;
  const uint64_t to = body.flat_begin + (end - start + width - 1) / width;
  for (uint64_t at = from; at < to && origins.size() < limit; at += kExplainBlock) {
    explainer.Block(at, std::min(at + kExplainBlock, to));
  }
  return {};
}

}  // namespace ckptfs
