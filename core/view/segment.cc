// SPDX-License-Identifier: Apache-2.0

#include "core/view/segment.h"

#include <cstring>
#include <span>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/view/atom_segment.h"

namespace ckptfs {
namespace {

// The bytes are made, not stored: nothing to find, to mark, to keep.
struct Kind {
  explicit Kind(const Segment& the_segment) : segment(the_segment) {}

  bool Lend(const StepModel&, uint64_t, uint64_t, Lender&) const { return false; }
  void Visit(const StepModel&, uint64_t, uint64_t, SourceVisitor&) const {}
  void Mark(const StepModel&, BlobUse, std::vector<bool>&) const {}
  std::optional<BlobIndex> WholeBlob(const StepModel&) const { return std::nullopt; }
  const std::string* Literal() const { return nullptr; }
  uint64_t MemoryBytes() const { return 0; }

  Status ExplainAs(Origin::Kind kind, uint64_t begin, uint64_t end,
                   std::vector<Origin>& origins) const {
    Origin origin;
    origin.begin = begin;
    origin.end = end;
    origin.kind = kind;
    AppendOrigin(origins, origin);
    return {};
  }

  const Segment& segment;
};

struct LiteralKind : Kind {
  LiteralKind(const Segment& the_segment, const LiteralSegment& the_body)
      : Kind(the_segment), body(the_body) {}

  Status Validate(const StepModel&) const {
    if (body.bytes != nullptr && body.bytes->size() == segment.length()) return {};
    return Refuse("a literal's bytes do not have the segment's length");
  }
  Status Read(const StepModel&, BlobReader&, uint64_t begin, uint64_t end, std::byte* out) const {
    std::memcpy(out, body.bytes->data() + begin, end - begin);
    return {};
  }
  bool Lend(const StepModel&, uint64_t begin, uint64_t end, Lender& lender) const {
    return lender.Add(std::as_bytes(std::span(*body.bytes)).subspan(begin, end - begin));
  }
  Status Explain(const StepModel&, uint64_t begin, uint64_t end, size_t,
                 std::vector<Origin>& origins) const {
    return ExplainAs(Origin::Kind::kLiteral, begin, end, origins);
  }
  const std::string* Literal() const { return body.bytes.get(); }
  uint64_t MemoryBytes() const { return body.bytes->capacity(); }

  const LiteralSegment& body;
};

struct ZeroKind : Kind {
  ZeroKind(const Segment& the_segment, const ZeroSegment& the_body)
      : Kind(the_segment), body(the_body) {}

  Status Validate(const StepModel&) const {
    return body.length == segment.length() ? Status{}
                                           : Refuse(
                                                 "zeros do not have the segment's "
                                                 "length");
  }
  Status Read(const StepModel&, BlobReader&, uint64_t begin, uint64_t end, std::byte* out) const {
    std::memset(out, 0, end - begin);
    return {};
  }
  Status Explain(const StepModel&, uint64_t begin, uint64_t end, size_t,
                 std::vector<Origin>& origins) const {
    return ExplainAs(Origin::Kind::kZero, begin, end, origins);
  }

  const ZeroSegment& body;
};

struct RenderedKind : Kind {
  RenderedKind(const Segment& the_segment, const RenderedSegment& the_body)
      : Kind(the_segment), body(the_body) {}

  // Rendering shows if the length is right.
  Status Validate(const StepModel&) const {
    if (body.renderer != nullptr && *body.renderer) return {};
    return Refuse("a rendered segment without a renderer");
  }
  Status Read(const StepModel&, BlobReader&, uint64_t begin, uint64_t end, std::byte* out) const {
    CKPT_ASSIGN_OR_RETURN(const std::string bytes, (*body.renderer)(body.piece));
    if (bytes.size() != segment.length()) {
      return Fail(ErrorCode::kInternal, StrCat("piece ", body.piece, " has ", bytes.size(),
                                               " bytes instead of ", segment.length()));
    }
    std::memcpy(out, bytes.data() + begin, end - begin);
    return {};
  }
  Status Explain(const StepModel&, uint64_t begin, uint64_t end, size_t,
                 std::vector<Origin>& origins) const {
    return ExplainAs(Origin::Kind::kLiteral, begin, end, origins);
  }

  const RenderedSegment& body;
};

struct BlobKind : Kind {
  BlobKind(const Segment& the_segment, const BlobSegment& the_body)
      : Kind(the_segment), body(the_body) {}

  Status Validate(const StepModel& model) const {
    if (static_cast<uint32_t>(body.blob) >= model.blobs.size()) return Refuse("no such blob");
    const Blob& blob = model.blob(body.blob);
    const uint64_t length = segment.length();
    if (body.length == length && RangeInside(body.offset, length, blob.stamp.size)) return {};
    return Refuse("bytes ", body.offset, " + ", length, " are not in ", blob.path);
  }
  Status Read(const StepModel&, BlobReader& blobs, uint64_t begin, uint64_t end,
              std::byte* out) const {
    return blobs.Read(body.blob, body.offset + begin, {out, end - begin});
  }
  bool Lend(const StepModel&, uint64_t begin, uint64_t end, Lender& lender) const {
    return lender.Add(body.blob, body.offset + begin, end - begin);
  }
  void Visit(const StepModel&, uint64_t begin, uint64_t end, SourceVisitor& visitor) const {
    (void)visitor.Visit(body.blob, body.offset + begin, end - begin);
  }
  Status Explain(const StepModel&, uint64_t begin, uint64_t end, size_t,
                 std::vector<Origin>& origins) const {
    Origin origin;
    origin.begin = begin;
    origin.end = end;
    origin.kind = Origin::Kind::kBlob;
    origin.blob = body.blob;
    origin.blob_offset = body.offset + (begin - segment.begin);
    origin.blob_length = end - begin;
    AppendOrigin(origins, origin);
    return {};
  }
  void Mark(const StepModel&, BlobUse, std::vector<bool>& blobs) const {
    blobs[static_cast<uint32_t>(body.blob)] = true;
  }
  std::optional<BlobIndex> WholeBlob(const StepModel& model) const {
    const bool known = static_cast<uint32_t>(body.blob) < model.blobs.size();
    if (!known || body.offset != 0 || body.length != model.blob(body.blob).stamp.size) {
      return std::nullopt;
    }
    return body.blob;
  }

  const BlobSegment& body;
};

struct AtomKind : Kind {
  AtomKind(const Segment& the_segment, const AtomSegment& the_body)
      : Kind(the_segment), body(the_body) {}

  Status Validate(const StepModel& model) const {
    return ValidateAtomSegment(body, segment.length(), model);
  }
  Status Read(const StepModel& model, BlobReader& blobs, uint64_t begin, uint64_t end,
              std::byte* out) const {
    return ReadAtomSegment(body, model, blobs, begin, end, out);
  }
  bool Lend(const StepModel& model, uint64_t begin, uint64_t end, Lender& lender) const {
    return LendAtomSegment(body, model, begin, end, lender);
  }
  void Visit(const StepModel& model, uint64_t begin, uint64_t end, SourceVisitor& visitor) const {
    VisitAtomSources(body, model, begin, end, visitor);
  }
  Status Explain(const StepModel& model, uint64_t begin, uint64_t end, size_t limit,
                 std::vector<Origin>& origins) const {
    return ExplainAtomSegment(body, segment.begin, model, begin, end, limit, origins);
  }
  void Mark(const StepModel& model, BlobUse use, std::vector<bool>& blobs) const {
    for (std::optional<AtomIndex> now = body.atom; now;
         now = DerivedFrom(model.atom(*now).source)) {
      const AtomSource& source = model.atom(*now).source;
      const auto gathers =
          use == BlobUse::kRead ? GathersRead(source) : std::span<const Gather>(source.gathers);
      AnyBlobOf(gathers, [&](uint32_t blob) {
        if (blob < blobs.size()) blobs[blob] = true;
        return false;
      });
    }
  }
  uint64_t MemoryBytes() const {
    uint64_t bytes = 0;
    for (const Piece& piece : body.local->pieces) {
      bytes += sizeof(Piece) + 3 * piece.shape.size() * sizeof(uint64_t);
    }
    return bytes;
  }

  const AtomSegment& body;
};

LiteralKind KindOf(const Segment& s, const LiteralSegment& body) { return {s, body}; }
ZeroKind KindOf(const Segment& s, const ZeroSegment& body) { return {s, body}; }
BlobKind KindOf(const Segment& s, const BlobSegment& body) { return {s, body}; }
AtomKind KindOf(const Segment& s, const AtomSegment& body) { return {s, body}; }
RenderedKind KindOf(const Segment& s, const RenderedSegment& body) { return {s, body}; }

template <class Act>
auto WithKind(const Segment& segment, Act&& act) {
  return std::visit([&](const auto& body) { return act(KindOf(segment, body)); }, segment.body);
}

}  // namespace

Status ValidateSegment(const Segment& segment, const StepModel& model) {
  return WithKind(segment, [&](const auto& kind) { return kind.Validate(model); });
}

Status ReadSegment(const Segment& segment, const StepModel& model, BlobReader& blobs,
                   uint64_t begin, uint64_t end, std::byte* out) {
  return WithKind(segment,
                  [&](const auto& kind) { return kind.Read(model, blobs, begin, end, out); });
}

bool LendSegment(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                 Lender& lender) {
  return WithKind(segment, [&](const auto& kind) { return kind.Lend(model, begin, end, lender); });
}

void VisitSources(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                  SourceVisitor& visitor) {
  WithKind(segment, [&](const auto& kind) { kind.Visit(model, begin, end, visitor); });
}

Status ExplainSegment(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                      size_t limit, std::vector<Origin>& origins) {
  return WithKind(
      segment, [&](const auto& kind) { return kind.Explain(model, begin, end, limit, origins); });
}

void MarkBlobs(const Segment& segment, const StepModel& model, BlobUse use,
               std::vector<bool>& blobs) {
  WithKind(segment, [&](const auto& kind) { kind.Mark(model, use, blobs); });
}

std::optional<BlobIndex> WholeBlobOf(const Segment& segment, const StepModel& model) {
  return WithKind(segment, [&](const auto& kind) { return kind.WholeBlob(model); });
}

const std::string* LiteralOf(const Segment& segment) {
  return WithKind(segment, [](const auto& kind) { return kind.Literal(); });
}

uint64_t MemoryBytesOf(const Segment& segment) {
  return WithKind(segment, [](const auto& kind) { return kind.MemoryBytes(); });
}

uint64_t SegmentBytes(uint64_t elements, DType dtype) {
  return ByteWidth(dtype) != 0 ? elements * ByteWidth(dtype)
                               : CeilDiv(elements * BitWidth(dtype), 8);
}

void AppendOrigin(std::vector<Origin>& origins, const Origin& next) {
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

}  // namespace ckptfs
