// SPDX-License-Identifier: Apache-2.0

#include "core/blob/fingerprint.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/io/file_stamp.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kBytesPerBlock = 16 << 10;
constexpr uint64_t kMaxBlocks = 16;

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

// In one call: all blocks are on their way before the first is waited for.
Result<Digest> DigestBlocks(const File& file, bool whole) {
  const std::vector<Extent> blocks = BlocksOf(file.size(), whole);
  size_t total = 0;
  for (const Extent& block : blocks) total += block.end - block.begin;
  std::vector<std::byte> bytes(total);
  std::vector<ReadRequest> requests;
  std::span<std::byte> room = bytes;
  for (const Extent& block : blocks) {
    requests.push_back({block.begin, room.first(block.end - block.begin)});
    room = room.subspan(block.end - block.begin);
  }
  CKPT_RETURN_IF_ERROR(file.ReadAt(requests));
  return DigestOf(bytes);
}

// True if nothing but the change time differs, and the fingerprint says that it was nothing.
Result<bool> IsExcusable(const File& file, const Blob& blob, const FileStamp& now) {
  const FileStamp& was = blob.stamp;
  if (now.size != was.size || now.inode != was.inode || now.mtime_ns != was.mtime_ns) return false;
  if (file.size() != was.size || blob.fingerprint == Digest{}) return false;
  CKPT_ASSIGN_OR_RETURN(const Digest digest, FingerprintOf(file));
  if (digest == blob.fingerprint) return true;
  CKPT_ASSIGN_OR_RETURN(const Digest brief, ShortFingerprintOf(file));
  return brief == blob.fingerprint;
}

}  // namespace

Result<Digest> FingerprintOf(const File& file) { return DigestBlocks(file, true); }

Result<Digest> ShortFingerprintOf(const File& file) { return DigestBlocks(file, false); }

bool FileCheck::IsExcused(BlobIndex index, const FileStamp& now) {
  MutexLock lock(mutex_);
  const auto known = excused_.find(static_cast<uint32_t>(index));
  return known != excused_.end() && known->second == now;
}

Status FileCheck::CheckAgain(const std::string& path, const FileStamp& now, BlobIndex index,
                             const Blob& blob) {
  if (IsExcused(index, now)) return {};
  return CompareStamps(path, blob.stamp, now);
}

Status FileCheck::CheckOpen(const File& file, BlobIndex index, const Blob& blob) {
  CKPT_ASSIGN_OR_RETURN(const FileIdentity found, file.Identity());
  const FileStamp& now = found.stamp;
  Status same = CompareStamps(file.name(), blob.stamp, now);
  if (same || IsExcused(index, now)) return {};
  CKPT_ASSIGN_OR_RETURN(const bool excusable, IsExcusable(file, blob, now));
  // Nobody wrote while the fingerprint was taken.
  CKPT_ASSIGN_OR_RETURN(const FileIdentity after, file.Identity());
  if (!excusable || !(after.stamp == now)) return same;
  MutexLock lock(mutex_);
  excused_[static_cast<uint32_t>(index)] = now;
  return {};
}

}  // namespace ckptfs
