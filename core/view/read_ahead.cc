// SPDX-License-Identifier: Apache-2.0

#include "core/view/read_ahead.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/blob/prefetch_requests.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

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
  PrefetchRequests requests(blobs);
  ForEachSourceRange(plan, model, offset, end, [&](BlobIndex blob, uint64_t at, uint64_t bytes) {
    requests.Add(blob, at, bytes);
    return true;
  });
}

}  // namespace ckptfs
