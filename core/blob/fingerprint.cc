// SPDX-License-Identifier: Apache-2.0

#include "core/blob/fingerprint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "core/base/strings.h"
#include "core/blob/file_stamp.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kBytesPerBlock = 16 << 10;
constexpr uint64_t kMaxBlocks = 16;

Status ReadExactly(int fd, uint64_t offset, std::byte* out, size_t length,
                   const std::string& path) {
  for (size_t done = 0; done < length;) {
    const ssize_t n = ::pread(fd, out + done, length - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail(ErrnoError(errno, path));
    if (n == 0) return Fail(ErrorCode::kDataLoss, StrCat(path, ": shorter than its size"));
    done += static_cast<size_t>(n);
  }
  return {};
}

// Where the blocks begin: the first and last bytes, then those between.
std::vector<Extent> BlocksOf(uint64_t size, bool whole) {
  const uint64_t head = std::min(size, kBlock);
  const uint64_t tail = std::min(size - head, kBlock);
  std::vector<Extent> blocks = {{0, head}, {size - tail, size}};
  const uint64_t between = size - head - tail;
  if (!whole || between == 0) return blocks;
  const uint64_t count = std::clamp<uint64_t>(between / kBytesPerBlock, 1, kMaxBlocks);
  const uint64_t share = between / count;
  const uint64_t length = std::min(share, kBlock);
  for (uint64_t i = 0; i < count; ++i) {
    // In the middle of its share, on a page.
    const uint64_t at = (head + i * share + (share - length) / 2) & ~(kBlock - 1);
    blocks.push_back({at, at + length});
  }
  return blocks;
}

Result<Digest> DigestBlocks(int fd, const std::vector<Extent>& blocks, const std::string& path) {
  size_t total = 0;
  // All are on their way before the first is waited for.
  for (const Extent& block : blocks) {
    total += block.end - block.begin;
    if (blocks.size() <= 2) continue;
    (void)::posix_fadvise(fd, static_cast<off_t>(block.begin),
                          static_cast<off_t>(block.end - block.begin), POSIX_FADV_WILLNEED);
  }
  std::vector<std::byte> bytes(total);
  size_t at = 0;
  for (const Extent& block : blocks) {
    const size_t length = block.end - block.begin;
    CKPT_RETURN_IF_ERROR(ReadExactly(fd, block.begin, bytes.data() + at, length, path));
    at += length;
  }
  return DigestOf(bytes);
}

// True if nothing but the change time differs, and the fingerprint says that it was nothing.
Result<bool> IsExcusable(int fd, const std::string& path, const Blob& blob, const BlobStamp& now) {
  const BlobStamp& was = blob.stamp;
  if (now.size != was.size || now.inode != was.inode || now.mtime_ns != was.mtime_ns) return false;
  if (blob.fingerprint == Digest{}) return false;
  CKPT_ASSIGN_OR_RETURN(const Digest digest, FingerprintOf(fd, now.size, path));
  if (digest == blob.fingerprint) return true;
  CKPT_ASSIGN_OR_RETURN(const Digest brief, ShortFingerprintOf(fd, now.size, path));
  return brief == blob.fingerprint;
}

}  // namespace

Result<Digest> FingerprintOf(int fd, uint64_t size, const std::string& path) {
  return DigestBlocks(fd, BlocksOf(size, true), path);
}

Result<Digest> ShortFingerprintOf(int fd, uint64_t size, const std::string& path) {
  return DigestBlocks(fd, BlocksOf(size, false), path);
}

bool FileCheck::IsExcused(BlobIndex index, const BlobStamp& now) {
  MutexLock lock(mutex_);
  const auto known = excused_.find(static_cast<uint32_t>(index));
  return known != excused_.end() && known->second == now;
}

Status FileCheck::CheckAgain(const std::string& path, BlobIndex index, const Blob& blob) {
  CKPT_ASSIGN_OR_RETURN(const BlobStamp now, StampOfFile(path));
  if (IsExcused(index, now)) return {};
  return CompareStamps(path, blob.stamp, now);
}

Status FileCheck::CheckOpen(int fd, const std::string& path, BlobIndex index, const Blob& blob) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Fail(ErrnoError(errno, path));
  const BlobStamp now = StampOf(info);
  Status same = CompareStamps(path, blob.stamp, now);
  if (same || IsExcused(index, now)) return {};
  CKPT_ASSIGN_OR_RETURN(const bool excusable, IsExcusable(fd, path, blob, now));
  // Nobody wrote while the fingerprint was taken.
  struct stat after {};
  if (::fstat(fd, &after) != 0) return Fail(ErrnoError(errno, path));
  if (!excusable || !(StampOf(after) == now)) return same;
  MutexLock lock(mutex_);
  excused_[static_cast<uint32_t>(index)] = now;
  return {};
}

}  // namespace ckptfs
