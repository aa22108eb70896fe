// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan_reader.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "core/base/mutex.h"
#include "core/base/parallel.h"
#include "core/view/read_ahead.h"

namespace ckptfs {
namespace {

// Bytes one task of ReadParallel fills: long enough to pay for a task, short
// enough to balance.
constexpr uint64_t kParallelBlock = 4 << 20;

// A reader that takes this much at once will read on; its sources are asked for this
// far ahead.
constexpr uint64_t kBulkRead = 128 << 10;
constexpr uint64_t kReadAhead = 32 << 20;

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
    CKPT_RETURN_IF_ERROR(ReadSegment(segment, model_, blobs_, from - segment.begin,
                                     to - segment.begin, out.data() + (from - offset)));
  }
  return static_cast<size_t>(end - offset);
}

std::optional<LentBytes> PlanReader::Lend(uint64_t offset, uint64_t length) const {
  if (offset >= plan_.size() || length < kBulkRead || blobs_.far()) return std::nullopt;
  const uint64_t end = offset + std::min(length, plan_.size() - offset);
  Lender lender(blobs_);
  const std::vector<Segment>& segments = plan_.segments();
  for (size_t i = plan_.FindSegment(offset); i < segments.size() && segments[i].begin < end; ++i) {
    const Segment& segment = segments[i];
    const uint64_t from = std::max(offset, segment.begin);
    const uint64_t to = std::min(end, segment.end);
    if (!LendSegment(segment, model_, from - segment.begin, to - segment.begin, lender)) {
      return std::nullopt;
    }
  }
  if (!lender.IsWorthIt()) return std::nullopt;
  ReadAhead(plan_, model_, blobs_, offset + kReadAhead, end - offset);
  return std::move(lender).Take();
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

Result<std::vector<Origin>> PlanReader::Explain(uint64_t offset, uint64_t length,
                                                size_t limit) const {
  std::vector<Origin> origins;
  if (offset >= plan_.size()) return origins;
  const uint64_t end = offset + std::min(length, plan_.size() - offset);
  const std::vector<Segment>& segments = plan_.segments();
  for (size_t i = plan_.FindSegment(offset);
       i < segments.size() && segments[i].begin < end && origins.size() <= limit; ++i) {
    CKPT_RETURN_IF_ERROR(ExplainSegment(segments[i], model_, std::max(offset, segments[i].begin),
                                        std::min(end, segments[i].end), limit, origins));
  }
  if (origins.size() > limit) origins.resize(limit);
  return origins;
}

}  // namespace ckptfs
