// SPDX-License-Identifier: Apache-2.0

#include "core/jobs/scattered_read.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <tuple>

#include "core/jobs/work_list.h"

namespace ckptfs {
namespace {

// Neighbours closer than this are read in one request, but not more than that.
constexpr uint64_t kGap = 4096;
constexpr uint64_t kReadBytes = uint64_t{1} << 20;
// What is asked for in one call.
constexpr size_t kRequests = 1024;
constexpr uint64_t kCallBytes = uint64_t{8} << 20;

// How many of the pieces, the first of them on, lie close together, and where
// they end.
std::pair<size_t, uint64_t> Neighbours(std::span<const ScatteredPiece> pieces) {
  uint64_t end = pieces.front().offset + pieces.front().length;
  size_t count = 1;
  for (; count < pieces.size() && pieces[count].offset <= end + kGap; ++count) {
    const uint64_t further = std::max(end, pieces[count].offset + pieces[count].length);
    if (further - pieces.front().offset > kReadBytes) break;
    end = further;
  }
  return {count, end};
}

// Requests of one call, and where the bytes of those go that are of several pieces.
class ScatteredCall {
 public:
  explicit ScatteredCall(char* data) : data_(data) {}

  void Add(std::span<const ScatteredPiece> pieces, uint64_t end) {
    const ScatteredPiece& first = pieces.front();
    std::span<char> room(data_ + first.destination, first.length);
    if (pieces.size() > 1) {
      room = shared_.emplace_back(pieces, std::vector<char>(end - first.offset)).second;
    }
    requests_.push_back({first.offset, std::as_writable_bytes(room)});
    bytes_ += room.size();
  }
  bool full() const { return requests_.size() >= kRequests || bytes_ >= kCallBytes; }

  // Returns how many requests there were; BLOCKS: on reading.
  Result<uint64_t> Run(const File& file) {
    CKPT_RETURN_IF_ERROR(file.ReadAt(requests_));
    for (const auto& [pieces, bytes] : shared_) {
      for (const ScatteredPiece& piece : pieces) {
        std::memcpy(data_ + piece.destination,
                    bytes.data() + (piece.offset - pieces.front().offset), piece.length);
      }
    }
    const uint64_t done = requests_.size();
    requests_.clear();
    shared_.clear();
    bytes_ = 0;
    return done;
  }

 private:
  char* const data_;
  uint64_t bytes_ = 0;
  std::vector<ReadRequest> requests_;
  std::vector<std::pair<std::span<const ScatteredPiece>, std::vector<char>>> shared_;
};

// Reads the pieces of one file to `data`; returns the requests it took.
Result<uint64_t> ReadPieces(const File& file, std::span<const ScatteredPiece> pieces, char* data) {
  uint64_t requests = 0;
  ScatteredCall call(data);
  while (!pieces.empty()) {
    const auto [count, end] = Neighbours(pieces);
    call.Add(pieces.first(count), end);
    pieces = pieces.subspan(count);
    if (!call.full() && !pieces.empty()) continue;
    CKPT_ASSIGN_OR_RETURN(const uint64_t done, call.Run(file));
    requests += done;
  }
  return requests;
}

// [first, last) pieces of each file.
std::vector<std::pair<size_t, size_t>> FilesOf(const std::vector<ScatteredPiece>& pieces) {
  std::vector<std::pair<size_t, size_t>> files;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool same = i > 0 && pieces[i].blob == pieces[i - 1].blob;
    if (!same) files.emplace_back(i, i);
    files.back().second = i + 1;
  }
  return files;
}

}  // namespace

Result<uint64_t> ReadScattered(BlobReader& blobs, std::vector<ScatteredPiece>& pieces,
                               unsigned threads, char* buffer) {
  std::sort(pieces.begin(), pieces.end(), [](const ScatteredPiece& a, const ScatteredPiece& b) {
    return std::tie(a.blob, a.offset) < std::tie(b.blob, b.offset);
  });
  const std::vector<std::pair<size_t, size_t>> files = FilesOf(pieces);
  std::atomic<uint64_t> reads{0};
  const auto read_one = [&](size_t i) -> Result<uint64_t> {
    const auto [first, last] = files[i];
    const BlobIndex blob{pieces[first].blob};
    CKPT_ASSIGN_OR_RETURN(const auto file, blobs.Open(blob));
    CKPT_ASSIGN_OR_RETURN(
        const uint64_t requests,
        ReadPieces(*file, std::span(pieces).subspan(first, last - first), buffer));
    // The name and what is open are still what was adopted.
    CKPT_ASSIGN_OR_RETURN(const FileIdentity open, file->Identity());
    CKPT_RETURN_IF_ERROR(blobs.CheckAgain(blob, open.stamp));
    CKPT_RETURN_IF_ERROR(blobs.CheckAgain(blob));
    reads += requests;
    return last - first;
  };
  JobOptions job;
  job.threads = threads;
  CKPT_RETURN_IF_ERROR(RunWorkList(files.size(), pieces.size(), job, read_one));
  return reads.load();
}

std::vector<uint32_t> BlobsOf(const std::vector<ScatteredPiece>& pieces) {
  std::vector<uint32_t> blobs;
  for (const auto& [first, last] : FilesOf(pieces)) blobs.push_back(pieces[first].blob);
  return blobs;
}

}  // namespace ckptfs
