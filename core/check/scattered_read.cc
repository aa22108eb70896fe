// SPDX-License-Identifier: Apache-2.0

#include "core/check/scattered_read.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <tuple>

#include "core/base/work_list.h"
#include "core/io/near_reads.h"

namespace ckptfs {
namespace {

// A file may hold millions of pieces.
constexpr size_t kAtOnce = size_t{1} << 16;

// Reads the pieces of one file to `data`; returns the requests it took.
Result<uint64_t> ReadPieces(const File& file, std::span<const ScatteredPiece> pieces, char* data) {
  uint64_t requests = 0;
  std::vector<ReadRequest> ranges;
  while (!pieces.empty()) {
    const auto some = pieces.first(std::min(pieces.size(), kAtOnce));
    pieces = pieces.subspan(some.size());
    ranges.clear();
    for (const ScatteredPiece& piece : some) {
      const std::span<char> room(data + piece.destination, piece.length);
      ranges.push_back({piece.offset, std::as_writable_bytes(room)});
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t done, ReadNear(file, ranges));
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
