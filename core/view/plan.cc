// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/view/decoded_atom.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

Status Broken(std::string rule) { return Fail(ErrorCode::kInvalid, std::move(rule)); }

// Bytes of `elements` elements; sub-byte types end on a whole byte.
uint64_t SegmentBytes(uint64_t elements, DType dtype) {
  return ByteWidth(dtype) != 0 ? elements * ByteWidth(dtype)
                               : CeilDiv(elements * BitWidth(dtype), 8);
}

// No two indexes of a box may name the same element of a target.
Status ValidateTarget(const LocalTensor& local) {
  for (const Piece& piece : local.pieces) {
    for (size_t d = 0; d < piece.shape.size(); ++d) {
      if (piece.shape[d] > 1 && piece.local_strides[d] == 0) {
        return Broken("a target piece has stride 0");
      }
    }
  }
  return {};
}

// Sub-byte values are shown whole and as stored.
Status ValidateSubByte(const AtomSegment& segment, const Atom& atom) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  if (segment.dtype != atom.dtype || segment.flat_begin != 0 || segment.flat_end != elements ||
      *segment.local != WholeTensor(atom.shape)) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("values of type ", DTypeName(atom.dtype), " can only be shown whole"));
  }
  return {};
}

Status ValidateAtomSegment(const AtomSegment& segment, uint64_t length, const StepModel& model) {
  if (static_cast<uint32_t>(segment.atom) >= model.atoms.size()) return Broken("no such atom");
  if (segment.local == nullptr) return Broken("an atom segment without a local tensor");
  const Atom& atom = model.atom(segment.atom);
  CKPT_RETURN_IF_ERROR(ValidateLocal(*segment.local, atom.shape));
  CKPT_RETURN_IF_ERROR(ValidateTarget(*segment.local));
  if (segment.flat_begin > segment.flat_end ||
      SegmentBytes(segment.flat_end - segment.flat_begin, segment.dtype) != length) {
    return Broken("an atom segment's range is not its length");
  }
  if (ByteWidth(atom.dtype) == 0 || ByteWidth(segment.dtype) == 0) {
    return ValidateSubByte(segment, atom);
  }
  CKPT_ASSIGN_OR_RETURN(const StoredAtom stored,
                        FindStoredAtom(model, segment.atom, segment.dtype));
  if (stored.atom->source.kind == SourceKind::kDecode) {
    CKPT_RETURN_IF_ERROR(CheckDecoded(model, *stored.atom));
  }
  return stored.MakeConversion(stored.atom->dtype, 1.0).map([](const Conversion&) {});
}

struct SegmentValidator {
  const StepModel& model;
  uint64_t length;

  Status operator()(const LiteralSegment& literal) const {
    if (literal.bytes != nullptr && literal.bytes->size() == length) return {};
    return Broken("a literal segment's bytes are not its length");
  }
  Status operator()(const AtomSegment& segment) const {
    return ValidateAtomSegment(segment, length, model);
  }
  Status operator()(const BlobSegment& segment) const {
    if (static_cast<uint32_t>(segment.blob) >= model.blobs.size()) return Broken("no such blob");
    const Blob& blob = model.blob(segment.blob);
    if (segment.length == length && RangeInside(segment.offset, length, blob.stamp.size)) return {};
    return Broken(StrCat("bytes ", segment.offset, " + ", length, " are not in ", blob.path));
  }
  Status operator()(const ZeroSegment& zeros) const {
    return zeros.length == length ? Status{} : Broken("a zero segment's length");
  }
};

}  // namespace

size_t Plan::FindSegment(uint64_t offset) const {
  const auto after = std::upper_bound(
      segments_.begin(), segments_.end(), offset,
      [](uint64_t wanted, const Segment& segment) { return wanted < segment.begin; });
  return static_cast<size_t>(after - segments_.begin()) - 1;
}

std::optional<BlobIndex> Plan::WholeBlob(const StepModel& model) const {
  if (segments_.size() != 1) return std::nullopt;
  const auto* body = std::get_if<BlobSegment>(&segments_.front().body);
  if (body == nullptr || body->offset != 0) return std::nullopt;
  if (static_cast<uint32_t>(body->blob) >= model.blobs.size()) return std::nullopt;
  if (body->length != model.blob(body->blob).stamp.size) return std::nullopt;
  return body->blob;
}

uint64_t Plan::MemoryBytes() const {
  uint64_t bytes = segments_.capacity() * sizeof(Segment);
  for (const Segment& segment : segments_) {
    if (const auto* literal = std::get_if<LiteralSegment>(&segment.body)) {
      bytes += literal->bytes->capacity();
    } else if (const auto* atom = std::get_if<AtomSegment>(&segment.body)) {
      for (const Piece& piece : atom->local->pieces) {
        bytes += sizeof(Piece) + 3 * piece.shape.size() * sizeof(uint64_t);
      }
    }
  }
  return bytes;
}

Status Plan::Validate(const StepModel& model) const {
  uint64_t offset = 0;
  for (const Segment& segment : segments_) {
    if (segment.begin != offset || segment.end <= segment.begin) {
      return Broken(StrCat("the segment at byte ", offset, " does not follow its predecessor"));
    }
    offset = segment.end;
    const SegmentValidator validator{model, segment.end - segment.begin};
    if (Status valid = std::visit(validator, segment.body); !valid) {
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
