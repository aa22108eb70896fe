// SPDX-License-Identifier: Apache-2.0
//
// A segment says what some bytes of a virtual file are: literal bytes, kept or
// rendered when they are read, a flat range of a rank's local tensor of an atom
// (cast), a range of a blob, or zeros.
// All operations on segments are here, and segment.cc is the only place that
// tells the kinds apart: a new kind is a body, a line in SegmentBody, and one
// class with its KindOf there.
//
// Thread safety: immutable values; pure functions apart from the blob reader.
// Lifetime: a body owns its literals; it refers to atoms and blobs by index.
// Units: bytes of the virtual file, except flat ranges (elements).

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"
#include "core/tensor/piece.h"
#include "core/view/lent_bytes.h"

namespace ckptfs {

// Blobs that some byte is a copy of or comes from, or those alone that are read for it.
enum class BlobUse { kAny, kRead };

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

// The bytes of one of the pieces that a long literal consists of.  Pure: the same
// piece has the same bytes every time.  May be called concurrently.
using PieceRenderer = std::function<Result<std::string>(uint64_t piece)>;

// A piece of a literal that is too long to be kept (the index of two million
// chunks): its length is known, its reader makes the bytes.
struct RenderedSegment {
  std::shared_ptr<const PieceRenderer> renderer;
  uint64_t piece = 0;
};

using SegmentBody =
    std::variant<LiteralSegment, AtomSegment, BlobSegment, ZeroSegment, RenderedSegment>;

struct Segment {
  uint64_t begin = 0;  // first byte in the file
  uint64_t end = 0;    // half-open
  SegmentBody body;

  uint64_t length() const { return end - begin; }
};

// Where some bytes of a virtual file come from, for `ckptfs explain`.
struct Origin {
  uint64_t begin = 0;  // [begin, end) bytes of the virtual file
  uint64_t end = 0;
  enum class Kind { kLiteral, kBlob, kZero, kInline } kind = Kind::kLiteral;
  BlobIndex blob{};          // kBlob
  uint64_t blob_offset = 0;  // kBlob: of the first byte; contiguous if !strided
  uint64_t blob_length = 0;  // bytes at the source (differs when cast)
  std::optional<AtomIndex> atom;
  DType stored = DType::kU8;  // dtype at the source
  DType shown = DType::kU8;   // dtype in the virtual file
};

// Is told where bytes lie, stretch by stretch.
class SourceVisitor {
 public:
  virtual ~SourceVisitor() = default;
  // False: no more.
  virtual bool Visit(BlobIndex blob, uint64_t offset, uint64_t length) = 0;
};

// It fits the model: atom and blob indexes, dtypes that can be cast, local
// tensors that pass ValidateLocal, ranges inside blobs.
Status ValidateSegment(const Segment& segment, const StepModel& model);

// Bytes [begin, end) of the segment, counted from its start.
// REQUIRES: here and below: ValidateSegment(segment, model) succeeded.
// BLOCKS: on the device where the page cache is cold.
Status ReadSegment(const Segment& segment, const StepModel& model, BlobReader& blobs,
                   uint64_t begin, uint64_t end, std::byte* out);

// Lends the same bytes.  False if they do not lie anywhere as they are shown, or for a
// reason that ReadSegment tells.
bool LendSegment(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                 Lender& lender);

// Where the sources of [begin, end) lie.  Only a hint: what cannot be found is
// left out.
void VisitSources(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                  SourceVisitor& visitor);

// Appends the origins of bytes [begin, end) of the file, which lie in the
// segment; about `limit` of them.
Status ExplainSegment(const Segment& segment, const StepModel& model, uint64_t begin, uint64_t end,
                      size_t limit, std::vector<Origin>& origins);

// Marks the blobs of it.
void MarkBlobs(const Segment& segment, const StepModel& model, BlobUse use,
               std::vector<bool>& blobs);

// The blob that it is, byte for byte.
std::optional<BlobIndex> WholeBlobOf(const Segment& segment, const StepModel& model);

// The bytes that it keeps; null if it does not keep them, but makes or reads them.
const std::string* LiteralOf(const Segment& segment);

// Heap bytes, the segment itself apart.
uint64_t MemoryBytesOf(const Segment& segment);

// Bytes of `elements` elements; sub-byte types end on a whole byte.
uint64_t SegmentBytes(uint64_t elements, DType dtype);

// Appends an origin, or lengthens the last one that it continues.
void AppendOrigin(std::vector<Origin>& origins, const Origin& next);

}  // namespace ckptfs
