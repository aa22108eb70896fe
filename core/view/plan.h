// SPDX-License-Identifier: Apache-2.0
//
// Plan is a virtual file as ordered segments: literal bytes, a flat range of a
// rank's local tensor of an atom (cast), a range of a blob, or zeros.  Size,
// offsets and literals are known without touching tensor bytes.
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
#include <variant>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/tensor/piece.h"

namespace ckptfs {

struct LiteralSegment {
  std::shared_ptr<const std::string> bytes;  // the whole string
};

// Elements [flat_begin, flat_end) of the row-major local tensor, stored as
// `dtype`.  Elements no piece maps are zero; so is everything at and beyond
// the local tensor's end (ZeRO padding).
struct AtomSegment {
  AtomIndex atom{};
  std::shared_ptr<const LocalTensor> local;
  uint64_t flat_begin = 0;
  uint64_t flat_end = 0;
  DType dtype = DType::kF32;
};

struct BlobSegment {
  BlobIndex blob{};
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct ZeroSegment {
  uint64_t length = 0;
};

using SegmentBody = std::variant<LiteralSegment, AtomSegment, BlobSegment, ZeroSegment>;

struct Segment {
  uint64_t begin = 0;  // first byte in the file
  uint64_t end = 0;    // half-open
  SegmentBody body;
};

class Plan {
 public:
  uint64_t size() const { return segments_.empty() ? 0 : segments_.back().end; }
  const std::vector<Segment>& segments() const { return segments_; }

  // Index of the segment that holds `offset`.  REQUIRES: offset < size().
  size_t FindSegment(uint64_t offset) const;

  // The blob whose whole content this file is, if it is one (serving `direct`).
  std::optional<BlobIndex> WholeBlob(const StepModel& model) const;

  // Heap bytes of segments and literals, for bounding plan caches.
  uint64_t MemoryBytes() const;

  // Segments fit the model: atom and blob indexes, dtypes that can be cast,
  // local tensors that pass ValidateLocal, ranges inside blobs.
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
