// SPDX-License-Identifier: Apache-2.0

#include "core/view/read_ahead.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

// Neighbours closer than this are asked for in one request.
constexpr uint64_t kCoalesceGap = 64 << 10;

// visit(blob, offset, length) for the sources of bytes [begin, end) of a
// segment, offsets counting from its start, until it returns false.
template <class Visit>
class SourceRanges {
 public:
  SourceRanges(const StepModel& model, uint64_t begin, uint64_t end, const Visit& visit)
      : model_(model), begin_(begin), end_(end), visit_(visit) {}

  void operator()(const LiteralSegment&) const {}
  void operator()(const ZeroSegment&) const {}
  void operator()(const BlobSegment& blob) const {
    (void)visit_(blob.blob, blob.offset + begin_, end_ - begin_);
  }
  void operator()(const AtomSegment& atom) const {
    const uint64_t width = ByteWidth(atom.dtype);
    const auto stored = FindStoredAtom(model_, atom.atom, atom.dtype);
    if (width == 0 || !stored) return;
    const AtomSource& source = stored->atom->source;
    if (source.kind > SourceKind::kAverage) return;  // inline, decoded, reserved
    for (const Gather& gather : source.gathers) {
      const RunsEnd how = ForEachSourceRun(
          gather, *atom.local, atom.flat_begin + begin_ / width,
          atom.flat_begin + CeilDiv(end_, width), [&](const SourceRun& run) {
            const auto extent = ExtentOf(run.count, run.source_stride, ByteWidth(run.stored));
            return extent && visit_(run.blob, run.offset, *extent);
          });
      // Replicas are read from the first; the average needs all.
      if (how != RunsEnd::kDone || source.kind != SourceKind::kAverage) return;
    }
  }

 private:
  const StepModel& model_;
  const uint64_t begin_;
  const uint64_t end_;
  const Visit& visit_;
};

template <class Visit>
void ForEachSourceRange(const Plan& plan, const StepModel& model, uint64_t begin, uint64_t end,
                        const Visit& visit) {
  const std::vector<Segment>& segments = plan.segments();
  for (size_t i = plan.FindSegment(begin); i < segments.size() && segments[i].begin < end; ++i) {
    const Segment& segment = segments[i];
    std::visit(SourceRanges<Visit>(model, std::max(begin, segment.begin) - segment.begin,
                                   std::min(end, segment.end) - segment.begin, visit),
               segment.body);
  }
}

// Joins neighbouring ranges, and asks for each.
class Requests {
 public:
  explicit Requests(BlobReader& blobs) : blobs_(blobs) {}
  ~Requests() { Send(); }
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  void Add(BlobIndex blob, uint64_t offset, uint64_t length) {
    if (blob_ != blob || offset < begin_ || offset > end_ + kCoalesceGap) {
      Send();
      blob_ = blob;
      begin_ = end_ = offset;
    }
    uint64_t end;
    if (!__builtin_add_overflow(offset, length, &end)) end_ = std::max(end_, end);
  }

 private:
  void Send() {
    if (begin_ == end_) return;
    if (const auto mapping = blobs_.Map(blob_)) blobs_.Prefetch(**mapping, begin_, end_ - begin_);
    begin_ = end_;
  }

  BlobReader& blobs_;
  BlobIndex blob_{};
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
};

// True if the source of one byte is not in the page cache.
bool LooksCold(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset) {
  bool cold = false;
  ForEachSourceRange(plan, model, offset, offset + 1,
                     [&](BlobIndex blob, uint64_t at, uint64_t) {
                       const auto mapping = blobs.Map(blob);
                       cold = mapping && !BlobReader::Resident(**mapping, at);
                       return false;
                     });
  return cold;
}

}  // namespace

void ReadAhead(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset,
               uint64_t length) {
  if (offset >= plan.size() || length == 0) return;
  const uint64_t end = offset + std::min(length, plan.size() - offset);
  const uint64_t middle = offset + (end - offset) / 2;
  if (!LooksCold(plan, model, blobs, offset) && !LooksCold(plan, model, blobs, middle) &&
      !LooksCold(plan, model, blobs, end - 1)) {
    return;
  }
  Requests requests(blobs);
  ForEachSourceRange(plan, model, offset, end, [&](BlobIndex blob, uint64_t at, uint64_t bytes) {
    requests.Add(blob, at, bytes);
    return true;
  });
}

}  // namespace ckptfs
