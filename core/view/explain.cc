// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "core/base/strings.h"
#include "core/view/decoded_atom.h"
#include "core/view/plan_reader.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

// Elements explained at a time, which bounds the memory.
constexpr uint64_t kExplainBlock = 1 << 16;

// Appends to `origins`, joining what continues the last one.
void Append(std::vector<Origin>& origins, const Origin& next) {
  if (!origins.empty()) {
    Origin& last = origins.back();
    const bool same = last.kind == next.kind && last.end == next.begin && last.atom == next.atom;
    const bool continues = next.kind != Origin::Kind::kBlob ||
                           (last.blob == next.blob && last.stored == next.stored &&
                            last.blob_offset + last.blob_length == next.blob_offset);
    if (same && continues) {
      last.end = next.end;
      last.blob_length += next.blob_length;
      return;
    }
  }
  origins.push_back(next);
}

class SegmentExplainer {
 public:
  SegmentExplainer(const StepModel& model, const Segment& segment, uint64_t begin, uint64_t end,
                   size_t limit, std::vector<Origin>& origins)
      : model_(model), segment_(segment), begin_(begin), end_(end), limit_(limit), out_(origins) {}

  Status operator()(const LiteralSegment&) { return Simple(Origin::Kind::kLiteral); }
  Status operator()(const ZeroSegment&) { return Simple(Origin::Kind::kZero); }
  Status operator()(const BlobSegment& blob) {
    Origin origin = Whole(Origin::Kind::kBlob);
    origin.blob = blob.blob;
    origin.blob_offset = blob.offset + (begin_ - segment_.begin);
    origin.blob_length = end_ - begin_;
    Append(out_, origin);
    return {};
  }
  Status operator()(const AtomSegment& segment);

 private:
  Origin Whole(Origin::Kind kind) const {
    Origin origin;
    origin.begin = begin_;
    origin.end = end_;
    origin.kind = kind;
    return origin;
  }
  Status Simple(Origin::Kind kind) {
    Append(out_, Whole(kind));
    return {};
  }
  void Block(const AtomSegment& segment, const StoredAtom& stored, uint64_t from, uint64_t to);
  void Collect(const AtomSegment& segment, const StoredAtom& stored, const SourceRun& run,
               std::vector<Origin>& found) const;
  uint64_t ByteOf(const AtomSegment& segment, uint64_t flat) const {
    return segment_.begin + (flat - segment.flat_begin) * ByteWidth(segment.dtype);
  }

  const StepModel& model_;
  const Segment& segment_;
  uint64_t begin_;  // bytes of the file
  uint64_t end_;
  size_t limit_;
  std::vector<Origin>& out_;
};

Status SegmentExplainer::operator()(const AtomSegment& segment) {
  const uint64_t width = ByteWidth(segment.dtype);
  if (width == 0) return Fail(ErrorCode::kUnsupported, "sub-byte values are not explained");
  CKPT_ASSIGN_OR_RETURN(StoredAtom stored, FindStoredAtom(model_, segment.atom, segment.dtype));
  if (stored.atom->source.kind == SourceKind::kDecode) {  // the values; scales are elsewhere
    CKPT_RETURN_IF_ERROR(CheckDecoded(model_, *stored.atom));
    const AtomIndex values = stored.atom->source.of;
    CKPT_ASSIGN_OR_RETURN(stored, FindStoredAtom(model_, values, model_.atom(values).dtype));
  }
  if (stored.atom->source.kind == SourceKind::kInline) {
    Origin origin = Whole(Origin::Kind::kInline);
    origin.atom = segment.atom;
    origin.stored = stored.atom->dtype;
    origin.shown = segment.dtype;
    Append(out_, origin);
    return {};
  }
  const uint64_t from = segment.flat_begin + (begin_ - segment_.begin) / width;
  const uint64_t to = segment.flat_begin + (end_ - segment_.begin + width - 1) / width;
  for (uint64_t at = from; at < to && out_.size() < limit_; at += kExplainBlock) {
    Block(segment, stored, at, std::min(at + kExplainBlock, to));
  }
  return {};
}

// One origin per run, or per element where a side is strided.
void SegmentExplainer::Collect(const AtomSegment& segment, const StoredAtom& stored,
                               const SourceRun& run, std::vector<Origin>& found) const {
  const bool dense = run.count == 1 || (run.target_stride == 1 && run.source_stride == 1);
  const uint64_t width = ByteWidth(run.stored);
  const uint64_t step = dense ? run.count : 1;
  for (uint64_t i = 0; i < run.count; i += step) {
    Origin origin;
    origin.kind = Origin::Kind::kBlob;
    origin.begin = ByteOf(segment, run.target + i * run.target_stride);
    origin.end = origin.begin + step * ByteWidth(segment.dtype);
    origin.blob = run.blob;
    origin.blob_offset = run.offset + i * run.source_stride * width;
    origin.blob_length = step * width;
    origin.atom = stored.index;
    origin.stored = run.stored;
    origin.shown = segment.dtype;
    found.push_back(origin);
  }
}

void SegmentExplainer::Block(const AtomSegment& segment, const StoredAtom& stored, uint64_t from,
                             uint64_t to) {
  std::vector<Origin> found;
  for (const Gather& gather : stored.GathersRead()) {
    (void)ForEachSourceRun(gather, *segment.local, from, to, [&](const SourceRun& run) {
      Collect(segment, stored, run, found);
      return true;
    });
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Origin& a, const Origin& b) { return a.begin < b.begin; });
  uint64_t now = ByteOf(segment, from);
  const auto zeros_to = [&](uint64_t end) {
    Origin zero;
    zero.kind = Origin::Kind::kZero;
    zero.begin = now;
    zero.end = end;
    if (now < end) Append(out_, zero);
    now = std::max(now, end);
  };
  for (const Origin& origin : found) {
    zeros_to(origin.begin);
    Append(out_, origin);
    now = std::max(now, origin.end);
  }
  zeros_to(ByteOf(segment, to));
}

}  // namespace

Result<std::vector<Origin>> PlanReader::Explain(uint64_t offset, uint64_t length,
                                                size_t limit) const {
  std::vector<Origin> origins;
  if (offset >= plan_.size()) return origins;
  const uint64_t end = offset + std::min(length, plan_.size() - offset);
  const std::vector<Segment>& segments = plan_.segments();
  for (size_t i = plan_.FindSegment(offset);
       i < segments.size() && segments[i].begin < end && origins.size() <= limit; ++i) {
    SegmentExplainer explainer(model_, segments[i], std::max(offset, segments[i].begin),
                               std::min(end, segments[i].end), limit, origins);
    CKPT_RETURN_IF_ERROR(std::visit(explainer, segments[i].body));
  }
  if (origins.size() > limit) origins.resize(limit);
  return origins;
}

}  // namespace ckptfs
