// SPDX-License-Identifier: Apache-2.0

#include "core/blob/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/checked_math.h"
#include "core/io/near_reads.h"

namespace ckptfs {
namespace {

constexpr uint64_t kRequestBytes = uint64_t{1} << 20;
constexpr uint64_t kRequestsAtOnce = 8;

// The gaps between the records; nothing unless all records have checksums and lie in the
// file, one after another.
std::vector<Extent> GapsOf(uint64_t size, std::span<const FileRecord> by_offset) {
  std::vector<Extent> gaps;
  uint64_t end = 0;
  for (const FileRecord& record : by_offset) {
    if (!record.crc || record.offset < end || !RangeInside(record.offset, record.length, size)) {
      return {};
    }
    if (record.offset > end) gaps.push_back({end, record.offset});
    end = record.offset + record.length;
  }
  if (end < size) gaps.push_back({end, size});
  return gaps;
}

void Append(std::vector<std::byte>& bytes, uint64_t value) {
  const size_t at = bytes.size();
  bytes.resize(at + sizeof(value));
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

}  // namespace

Result<Digest> FrameDigestOf(const File& file, std::span<const FileRecord> records) {
  std::vector<FileRecord> sorted(records.begin(), records.end());
  std::sort(sorted.begin(), sorted.end(), [](const FileRecord& a, const FileRecord& b) {
    return std::pair(a.offset, a.length) < std::pair(b.offset, b.length);
  });
  const std::vector<Extent> gaps = GapsOf(file.size(), sorted);
  uint64_t total = 0;
  for (const Extent& gap : gaps) total += gap.end - gap.begin;
  if (sorted.empty() || gaps.empty() || total > kMaxFrameBytes) return Digest{};
  std::vector<std::byte> bytes;
  bytes.reserve(sorted.size() * 3 * sizeof(uint64_t) + total);
  for (const FileRecord& record : sorted) {
    Append(bytes, record.offset);
    Append(bytes, record.length);
    Append(bytes, *record.crc);
  }
  const size_t head = bytes.size();
  bytes.resize(head + total);
  std::span<std::byte> room = std::span(bytes).subspan(head);
  std::vector<ReadRequest> requests;
  requests.reserve(gaps.size());
  for (const Extent& gap : gaps) {
    requests.push_back({gap.begin, room.first(gap.end - gap.begin)});
    room = room.subspan(gap.end - gap.begin);
  }
  // A file of many short records has as many gaps, hardly apart.
  CKPT_RETURN_IF_ERROR(ReadNear(file, requests));
  return DigestOf(std::span<const std::byte>(bytes));
}

Status ReadAllOf(const File& file,
                 const std::function<Status(uint64_t, std::span<const std::byte>)>& visit) {
  std::vector<std::byte> buffer(std::min(file.size(), kRequestBytes * kRequestsAtOnce));
  std::vector<ReadRequest> requests;
  for (uint64_t at = 0; at < file.size(); at += buffer.size()) {
    const size_t count = std::min<uint64_t>(buffer.size(), file.size() - at);
    requests.clear();
    for (uint64_t begin = 0; begin < count; begin += kRequestBytes) {
      const size_t length = std::min(kRequestBytes, count - begin);
      requests.push_back({at + begin, std::span(buffer).subspan(begin, length)});
    }
    CKPT_RETURN_IF_ERROR(file.ReadAt(requests));
    CKPT_RETURN_IF_ERROR(visit(at, std::span<const std::byte>(buffer).first(count)));
  }
  return {};
}

Result<bool> HoldsFrame(const File& file, const Digest& frame, std::vector<FileRecord> records,
                        const std::function<Status()>& go_on) {
  CKPT_ASSIGN_OR_RETURN(const Digest now, FrameDigestOf(file, records));
  if (frame == Digest{} || now != frame) return false;
  RecordSums sums(std::move(records));
  CKPT_RETURN_IF_ERROR(ReadAllOf(file, [&](uint64_t at, std::span<const std::byte> bytes) {
    sums.Add(at, bytes);
    return go_on();
  }));
  return sums.Wrong().empty();
}

}  // namespace ckptfs
