// SPDX-License-Identifier: Apache-2.0

#include "core/view/read_ahead.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/blob/prefetch_requests.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

// How far ahead of a bulk read blocks are asked for: twice what 200 MB/s deliver
// in the 20 ms that a request takes, and little enough for many readers to share
// a cache.
constexpr uint64_t kFarWindow = 8 << 20;

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
    for (const Gather& gather : stored->GathersRead()) {
      const RunsEnd how = ForEachSourceRun(
          gather, *atom.local, atom.flat_begin + begin_ / width,
          atom.flat_begin + CeilDiv(end_, width), [&](const SourceRun& run) {
            const auto extent = ExtentOf(run.count, run.source_stride, ByteWidth(run.stored));
            return extent && visit_(run.blob, run.offset, *extent);
          });
      if (how != RunsEnd::kDone) return;
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

void Request(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t begin,
             uint64_t end) {
  PrefetchRequests requests(blobs);
  ForEachSourceRange(plan, model, begin, end, [&](BlobIndex blob, uint64_t at, uint64_t bytes) {
    requests.Add(blob, at, bytes);
    return true;
  });
}

// True if the source of one byte is not in its cache.
bool LooksCold(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset) {
  bool cold = false;
  ForEachSourceRange(plan, model, offset, offset + 1,
                     [&](BlobIndex blob, uint64_t at, uint64_t) {
                       const auto held = blobs.Hold(blob);
                       cold = held && !blobs.Resident(**held, at);
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
  Request(plan, model, blobs, offset, end);
}

void RequestFar(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset,
                uint64_t length, bool bulk) {
  if (offset >= plan.size() || length == 0) return;
  const uint64_t end = offset + std::min(length, plan.size() - offset);
  const uint64_t window = bulk ? end + std::min(kFarWindow, plan.size() - end) : end;
  // What the read before this one asked for ahead is not asked for again.
  const bool first = LooksCold(plan, model, blobs, offset) || LooksCold(plan, model, blobs, end - 1);
  const uint64_t known = first ? offset : std::max(end, window - std::min(window, end - offset));
  if (known < window) Request(plan, model, blobs, known, window);
}

}  // namespace ckptfs
