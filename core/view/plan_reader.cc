// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan_reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/mutex.h"
#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/view/atom_reader.h"
#include "core/view/read_ahead.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

// Bytes one task of ReadParallel fills: long enough to pay for a task, short
// enough to balance.
constexpr uint64_t kParallelBlock = 4 << 20;
constexpr size_t kMaxWidth = 16;

// Who reads this much at once will read on; its sources are asked for this far
// ahead.
constexpr uint64_t kBulkRead = 128 << 10;
constexpr uint64_t kReadAhead = 32 << 20;

// Fills bytes [begin, end) of one segment; offsets count from its start.
struct SegmentFiller {
  const StepModel& model;
  BlobReader& blobs;
  uint64_t begin;
  uint64_t end;
  std::byte* out;

  Status operator()(const LiteralSegment& literal) const {
    std::memcpy(out, literal.bytes->data() + begin, end - begin);
    return {};
  }
  Status operator()(const BlobSegment& blob) const {
    return blobs.Read(blob.blob, blob.offset + begin, {out, end - begin});
  }
  Status operator()(const ZeroSegment&) const {
    std::memset(out, 0, end - begin);
    return {};
  }
  Status operator()(const AtomSegment& atom) const {
    const uint64_t width = ByteWidth(atom.dtype);
    if (width == 0) return ReadPackedAtom(model, blobs, atom, begin, end, out);
    const uint64_t whole_begin = (begin + width - 1) / width;
    const uint64_t whole_end = end / width;
    if (whole_begin > whole_end) return PartOfElement(atom, whole_end, begin, end);
    if (begin < whole_begin * width) {
      CKPT_RETURN_IF_ERROR(PartOfElement(atom, whole_begin - 1, begin, whole_begin * width));
    }
    if (whole_begin < whole_end) {
      CKPT_RETURN_IF_ERROR(ReadAtom(model, blobs, atom, atom.flat_begin + whole_begin,
                                    atom.flat_begin + whole_end,
                                    out + (whole_begin * width - begin)));
    }
    if (whole_end * width < end) return PartOfElement(atom, whole_end, whole_end * width, end);
    return {};
  }

  // Bytes [from, to) of the segment, all in one element.
  Status PartOfElement(const AtomSegment& atom, uint64_t element, uint64_t from,
                       uint64_t to) const {
    std::array<std::byte, kMaxWidth> whole;
    const uint64_t flat = atom.flat_begin + element;
    CKPT_RETURN_IF_ERROR(ReadAtom(model, blobs, atom, flat, flat + 1, whole.data()));
    std::memcpy(out + (from - begin), whole.data() + (from - element * ByteWidth(atom.dtype)),
                to - from);
    return {};
  }
};

}  // namespace

PlanReader::PlanReader(const Plan& plan, const StepModel& model, BlobReader& blobs)
    : plan_(plan), model_(model), blobs_(blobs) {}

Result<size_t> PlanReader::Read(uint64_t offset, std::span<std::byte> out) const {
  if (offset >= plan_.size() || out.empty()) return size_t{0};
  const uint64_t end = offset + std::min<uint64_t>(out.size(), plan_.size() - offset);
  const bool bulk = out.size() >= kBulkRead;
  if (blobs_.far()) {
    RequestFar(plan_, model_, blobs_, offset, end - offset, bulk);
  } else if (bulk) {
    ReadAhead(plan_, model_, blobs_, offset + kReadAhead, end - offset);
  }
  const std::vector<Segment>& segments = plan_.segments();
  for (size_t i = plan_.FindSegment(offset); i < segments.size() && segments[i].begin < end; ++i) {
    const Segment& segment = segments[i];
    const uint64_t from = std::max(offset, segment.begin);
    const uint64_t to = std::min(end, segment.end);
    const SegmentFiller filler{model_, blobs_, from - segment.begin, to - segment.begin,
                               out.data() + (from - offset)};
    CKPT_RETURN_IF_ERROR(std::visit(filler, segment.body));
  }
  return static_cast<size_t>(end - offset);
}

Result<size_t> PlanReader::ReadParallel(uint64_t offset, std::span<std::byte> out) const {
  if (offset >= plan_.size() || out.empty()) return size_t{0};
  const uint64_t size = std::min<uint64_t>(out.size(), plan_.size() - offset);
  if (size <= kParallelBlock) return Read(offset, out);
  Mutex mutex;
  std::optional<Error> first_error;
  // Blocks end on multiples of the block size in the file, so that no element
  // of an aligned tensor is cut.
  const uint64_t first_block = offset / kParallelBlock;
  const uint64_t blocks = (offset + size - 1) / kParallelBlock + 1 - first_block;
  // In file order, so that what one block read ahead is there for another.
  std::atomic<uint64_t> next{0};
  ParallelFor(blocks, [&](size_t) {
    const uint64_t block = next.fetch_add(1, std::memory_order_relaxed);
    const uint64_t from = std::max(offset, (first_block + block) * kParallelBlock);
    const uint64_t to = std::min(offset + size, (first_block + block + 1) * kParallelBlock);
    const auto read = Read(from, out.subspan(from - offset, to - from));
    if (read) return;
    MutexLock lock(mutex);
    if (!first_error) first_error = read.error();
  });
  if (first_error) return Fail(*std::move(first_error));
  return static_cast<size_t>(size);
}

}  // namespace ckptfs
