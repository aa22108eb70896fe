// SPDX-License-Identifier: Apache-2.0

#include "core/jobs/scattered_read.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <tuple>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "core/io/file_stamp.h"
#include "core/jobs/work_list.h"

namespace ckptfs {
namespace {

// Neighbours closer than this are read in one call.
constexpr uint64_t kGap = 4096;
constexpr uint64_t kReadBytes = uint64_t{1} << 20;

// One source file, open, of which only what the stamp says is read.
class SourceFile {
 public:
  SourceFile(const StepModel& model, uint32_t blob)
      : blob_(model.blobs[blob]), path_(model.PathOf(blob_)) {}

  Status Open() {
    // O_NONBLOCK: a fifo put in the file's place must not hang us.
    file_ = Descriptor(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    struct stat info;
    if (!file_.valid() || fstat(file_.get(), &info) != 0) return Fail(ErrnoError(errno, path_));
    if (!S_ISREG(info.st_mode)) {
      return Fail(ErrorCode::kStale, StrCat(path_, " is no file any more"));
    }
    // No read-ahead between the pieces, and no pages kept for their sake.
    (void)posix_fadvise(file_.get(), 0, 0, POSIX_FADV_RANDOM);
    (void)posix_fadvise(file_.get(), 0, 0, POSIX_FADV_NOREUSE);
    return CompareStamps(path_, blob_.stamp, StampOf(info));
  }

  Status Read(uint64_t offset, char* out, uint64_t length) {
    while (length > 0) {
      const ssize_t n = pread(file_.get(), out, length, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Fail(ErrnoError(errno, path_));
      if (n == 0) return Fail(ErrorCode::kDataLoss, StrCat(path_, " ends at byte ", offset));
      offset += static_cast<uint64_t>(n);
      out += n;
      length -= static_cast<uint64_t>(n);
    }
    return {};
  }

  // The name and what is open are still what was adopted.
  Status Unchanged() const {
    struct stat info;
    if (fstat(file_.get(), &info) != 0) return Fail(ErrnoError(errno, path_));
    CKPT_RETURN_IF_ERROR(CompareStamps(path_, blob_.stamp, StampOf(info)));
    CKPT_ASSIGN_OR_RETURN(const BlobStamp named, StampOfFile(path_));
    return CompareStamps(path_, blob_.stamp, named);
  }

 private:
  const Blob& blob_;
  const std::string path_;
  Descriptor file_;
};

// Reads the pieces of one file to `data`; returns the calls it took.
Result<uint64_t> ReadPieces(SourceFile& file, std::span<const ScatteredPiece> pieces, char* data) {
  uint64_t calls = 0;
  std::string buffer;
  while (!pieces.empty()) {
    const ScatteredPiece& first = pieces.front();
    uint64_t end = first.offset + first.length;
    size_t count = 1;  // of pieces that lie close together
    for (; count < pieces.size() && pieces[count].offset <= end + kGap; ++count) {
      const uint64_t further = std::max(end, pieces[count].offset + pieces[count].length);
      if (further - first.offset > kReadBytes) break;
      end = further;
    }
    ++calls;
    if (count == 1) {
      CKPT_RETURN_IF_ERROR(file.Read(first.offset, data + first.destination, first.length));
    } else {
      buffer.resize(end - first.offset);
      CKPT_RETURN_IF_ERROR(file.Read(first.offset, buffer.data(), buffer.size()));
      for (const ScatteredPiece& piece : pieces.first(count)) {
        std::memcpy(data + piece.destination, buffer.data() + (piece.offset - first.offset),
                    piece.length);
      }
    }
    pieces = pieces.subspan(count);
  }
  return calls;
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

Result<uint64_t> ReadScattered(const StepModel& model, std::vector<ScatteredPiece>& pieces,
                               unsigned threads, char* buffer) {
  std::sort(pieces.begin(), pieces.end(), [](const ScatteredPiece& a, const ScatteredPiece& b) {
    return std::tie(a.blob, a.offset) < std::tie(b.blob, b.offset);
  });
  const std::vector<std::pair<size_t, size_t>> files = FilesOf(pieces);
  std::atomic<uint64_t> reads{0};
  const auto read_one = [&](size_t i) -> Result<uint64_t> {
    const auto [first, last] = files[i];
    SourceFile file(model, pieces[first].blob);
    CKPT_RETURN_IF_ERROR(file.Open());
    CKPT_ASSIGN_OR_RETURN(
        const uint64_t calls,
        ReadPieces(file, std::span(pieces).subspan(first, last - first), buffer));
    CKPT_RETURN_IF_ERROR(file.Unchanged());
    reads += calls;
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
