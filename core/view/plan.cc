// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {

size_t Plan::FindSegment(uint64_t offset) const {
  const auto after = std::upper_bound(
      segments_.begin(), segments_.end(), offset,
      [](uint64_t wanted, const Segment& segment) { return wanted < segment.begin; });
  return static_cast<size_t>(after - segments_.begin()) - 1;
}

std::optional<BlobIndex> Plan::WholeBlob(const StepModel& model) const {
  if (segments_.size() != 1) return std::nullopt;
  return WholeBlobOf(segments_.front(), model);
}

uint64_t Plan::MemoryBytes() const {
  uint64_t bytes = segments_.capacity() * sizeof(Segment);
  for (const Segment& segment : segments_) bytes += MemoryBytesOf(segment);
  return bytes;
}

std::vector<BlobIndex> Plan::Blobs(const StepModel& model, BlobUse use) const {
  std::vector<bool> marked(model.blobs.size());
  for (const Segment& segment : segments_) MarkBlobs(segment, model, use, marked);
  std::vector<BlobIndex> blobs;
  for (size_t i = 0; i < marked.size(); ++i) {
    if (marked[i]) blobs.push_back(BlobIndex{static_cast<uint32_t>(i)});
  }
  return blobs;
}

Status Plan::Validate(const StepModel& model) const {
  uint64_t offset = 0;
  for (const Segment& segment : segments_) {
    if (segment.begin != offset || segment.end <= segment.begin) {
      return Refuse("the segment at byte ", offset, " does not follow its predecessor");
    }
    offset = segment.end;
    if (Status valid = ValidateSegment(segment, model); !valid) {
      return Fail(std::move(valid).error().WithContext(
          StrCat("segment at bytes [", segment.begin, ", ", segment.end, ")")));
    }
  }
  return {};
}

void PlanBuilder::Append(uint64_t length, SegmentBody body) {
  if (length == 0) return;
  const uint64_t begin = plan_.size();
  plan_.segments_.push_back(Segment{begin, begin + length, std::move(body)});
}

void PlanBuilder::Literal(std::string bytes) {
  Literal(std::make_shared<const std::string>(std::move(bytes)));
}

void PlanBuilder::Literal(std::shared_ptr<const std::string> bytes) {
  const uint64_t length = bytes->size();
  Append(length, LiteralSegment{std::move(bytes)});
}

void PlanBuilder::Atom(AtomIndex atom, std::shared_ptr<const LocalTensor> local,
                       uint64_t flat_begin, uint64_t flat_end, DType dtype) {
  CKPT_CHECK(flat_begin <= flat_end);
  Append(SegmentBytes(flat_end - flat_begin, dtype),
         AtomSegment{atom, std::move(local), flat_begin, flat_end, dtype});
}

void PlanBuilder::BlobRange(BlobIndex blob, uint64_t offset, uint64_t length) {
  Append(length, BlobSegment{blob, offset, length});
}

void PlanBuilder::Zeros(uint64_t length) { Append(length, ZeroSegment{length}); }

Plan PlanBuilder::Finish() && { return std::move(plan_); }

}  // namespace ckptfs
