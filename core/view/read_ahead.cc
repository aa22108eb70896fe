// SPDX-License-Identifier: Apache-2.0

#include "core/view/read_ahead.h"

#include <algorithm>

#include "core/blob/prefetch_requests.h"

namespace ckptfs {
namespace {

// The sources of bytes [begin, end) of the file.
void VisitPlan(const Plan& plan, const StepModel& model, uint64_t begin, uint64_t end,
               SourceVisitor& visitor) {
  const std::vector<Segment>& segments = plan.segments();
  for (size_t i = plan.FindSegment(begin); i < segments.size() && segments[i].begin < end; ++i) {
    const Segment& segment = segments[i];
    VisitSources(segment, model, std::max(begin, segment.begin) - segment.begin,
                 std::min(end, segment.end) - segment.begin, visitor);
  }
}

class ColdLook final : public SourceVisitor {
 public:
  explicit ColdLook(BlobReader& blobs) : blobs_(blobs) {}
  bool Visit(BlobIndex blob, uint64_t offset, uint64_t) override {
    const auto mapping = blobs_.Map(blob);
    cold_ = mapping && !BlobReader::Resident(**mapping, offset);
    return false;
  }
  bool cold() const { return cold_; }

 private:
  BlobReader& blobs_;
  bool cold_ = false;
};

class Prefetch final : public SourceVisitor {
 public:
  explicit Prefetch(BlobReader& blobs) : requests_(blobs) {}
  bool Visit(BlobIndex blob, uint64_t offset, uint64_t length) override {
    requests_.Add(blob, offset, length);
    return true;
  }

 private:
  PrefetchRequests requests_;
};

// True if the source of one byte is not in the page cache.
bool LooksCold(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset) {
  ColdLook look(blobs);
  VisitPlan(plan, model, offset, offset + 1, look);
  return look.cold();
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
  Prefetch prefetch(blobs);
  VisitPlan(plan, model, offset, end, prefetch);
}

}  // namespace ckptfs
