// SPDX-License-Identifier: Apache-2.0
//
// Plan is a virtual file as ordered segments (segment.h).  Size, offsets and
// literals are known without touching tensor bytes.
//
// Thread safety: immutable once built.
// Lifetime: owns its literals; refers to atoms and blobs of a StepModel by
// index, which the reader is given.
// Units: bytes of the virtual file, except flat ranges (elements).

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/tensor/piece.h"
#include "core/view/segment.h"

namespace ckptfs {

class Plan {
 public:
  uint64_t size() const { return segments_.empty() ? 0 : segments_.back().end; }
  const std::vector<Segment>& segments() const { return segments_; }

  // Index of the segment that holds `offset`.  REQUIRES: offset < size().
  size_t FindSegment(uint64_t offset) const;

  // The blob whose whole content this file is, if it is one (serving `direct`).
  // REQUIRES: Validate(model).
  std::optional<BlobIndex> WholeBlob(const StepModel& model) const;

  // Heap bytes of segments and literals, for bounding plan caches.
  uint64_t MemoryBytes() const;

  // Its blobs, sorted.  REQUIRES: Validate(model).
  std::vector<BlobIndex> Blobs(const StepModel& model, BlobUse use) const;

  // Segments follow each other and fit the model (ValidateSegment).
  Status Validate(const StepModel& model) const;

 private:
  friend class PlanBuilder;
  std::vector<Segment> segments_;
};

// Appends segments in file order.  Empty ones are dropped, neighbouring zeros
// and literals are not merged.
class PlanBuilder {
 public:
  void Literal(std::string bytes);
  void Literal(std::shared_ptr<const std::string> bytes);
  // Bytes = (flat_end - flat_begin) * ByteWidth(dtype); sub-byte dtypes only
  // whole and uncast.
  void Atom(AtomIndex atom, std::shared_ptr<const LocalTensor> local, uint64_t flat_begin,
            uint64_t flat_end, DType dtype);
  void BlobRange(BlobIndex blob, uint64_t offset, uint64_t length);
  void Zeros(uint64_t length);
  // Any body whose length the caller knows.
  void Append(uint64_t length, SegmentBody body);
  uint64_t size() const { return plan_.size(); }
  Plan Finish() &&;

 private:
  Plan plan_;
};

}  // namespace ckptfs
