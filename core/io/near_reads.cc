// SPDX-License-Identifier: Apache-2.0

#include "core/io/near_reads.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/checked_math.h"

namespace ckptfs {
namespace {

// Neighbours closer than this are read in one request, but not more than that.
constexpr uint64_t kGap = 4096;
constexpr uint64_t kReadBytes = uint64_t{1} << 20;
// The ranges that one call asks for.
constexpr size_t kRequests = 1024;
constexpr uint64_t kCallBytes = uint64_t{8} << 20;

// How many of the ranges, the first of them on, lie close together, and where they end.
// All of them lie in the file.
std::pair<size_t, uint64_t> Neighbours(std::span<const ReadRequest> ranges) {
  const uint64_t begin = ranges.front().offset;
  uint64_t end = begin + ranges.front().out.size();
  size_t count = 1;
  for (; count < ranges.size(); ++count) {
    const ReadRequest& next = ranges[count];
    if (next.offset < begin || next.offset > end + kGap) break;
    const uint64_t further = std::max(end, next.offset + next.out.size());
    if (further - begin > kReadBytes) break;
    end = further;
  }
  return {count, end};
}

// Requests of one call, and the room of those that are of several ranges.
class NearCall {
 public:
  void Add(std::span<const ReadRequest> ranges, uint64_t end) {
    std::span<std::byte> room = ranges.front().out;
    if (ranges.size() > 1) {
      const size_t length = end - ranges.front().offset;
      shared_.emplace_back(ranges, std::make_unique_for_overwrite<std::byte[]>(length));
      room = {shared_.back().second.get(), length};
    }
    requests_.push_back({ranges.front().offset, room});
    bytes_ += room.size();
  }
  bool full() const { return requests_.size() >= kRequests || bytes_ >= kCallBytes; }

  // Returns how many requests there were.
  Result<uint64_t> Run(const File& file) {
    CKPT_RETURN_IF_ERROR(file.ReadAt(requests_));
    for (const auto& [ranges, bytes] : shared_) {
      for (const ReadRequest& range : ranges) {
        if (range.out.empty()) continue;
        std::memcpy(range.out.data(), bytes.get() + (range.offset - ranges.front().offset),
                    range.out.size());
      }
    }
    const uint64_t done = requests_.size();
    requests_.clear();
    shared_.clear();
    bytes_ = 0;
    return done;
  }

 private:
  uint64_t bytes_ = 0;
  std::vector<ReadRequest> requests_;
  std::vector<std::pair<std::span<const ReadRequest>, std::unique_ptr<std::byte[]>>> shared_;
};

}  // namespace

Result<uint64_t> ReadNear(const File& file, std::span<const ReadRequest> ranges) {
  for (const ReadRequest& range : ranges) {
    if (RangeInside(range.offset, range.out.size(), file.size())) continue;
    CKPT_RETURN_IF_ERROR(file.ReadAt({&range, 1}));  // says so
  }
  uint64_t requests = 0;
  NearCall call;
  while (!ranges.empty()) {
    const auto [count, end] = Neighbours(ranges);
    call.Add(ranges.first(count), end);
    ranges = ranges.subspan(count);
    if (!call.full() && !ranges.empty()) continue;
    CKPT_ASSIGN_OR_RETURN(const uint64_t done, call.Run(file));
    requests += done;
  }
  return requests;
}

}  // namespace ckptfs
