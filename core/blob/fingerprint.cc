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

constexpr int kLooks = 3;  // at a file that keeps moving

// Only times differ.
bool OnlyMoved(const FileStamp& was, const FileStamp& now) {
  return now.size == was.size && now.inode == was.inode;
}

Result<bool> HoldsFingerprint(const File& file, const Blob& blob) {
  if (file.size() != blob.stamp.size || blob.fingerprint == Digest{}) return false;
  CKPT_ASSIGN_OR_RETURN(const Digest digest, FingerprintOf(file));
  if (digest == blob.fingerprint) return true;
  CKPT_ASSIGN_OR_RETURN(const Digest brief, ShortFingerprintOf(file));
  return brief == blob.fingerprint;
}

}  // namespace

Result<Digest> FingerprintOf(const File& file) { return DigestBlocks(file, true); }

Result<Digest> ShortFingerprintOf(const File& file) { return DigestBlocks(file, false); }

bool FileCheck::Passed(BlobIndex index, const FileStamp& now) {
  MutexLock lock(mutex_);
  const auto known = passed_.find(static_cast<uint32_t>(index));
  return known != passed_.end() && known->second == now;
}

bool FileCheck::Refused(BlobIndex index, const FileStamp& now) {
  MutexLock lock(mutex_);
  const auto known = refused_.find(static_cast<uint32_t>(index));
  return known != refused_.end() && known->second == now;
}

void FileCheck::Refuse(BlobIndex index, const FileStamp& now) {
  MutexLock lock(mutex_);
  refused_[static_cast<uint32_t>(index)] = now;
}

void FileCheck::Pass(BlobIndex index, const FileStamp& now) {
  MutexLock lock(mutex_);
  const auto [known, first] = passed_.try_emplace(static_cast<uint32_t>(index), now);
  if (first) return;
  if (known->second.mtime_ns != now.mtime_ns) moved_.fetch_add(1, std::memory_order_release);
  known->second = now;
}

Result<Look> FileCheck::LookAt(const std::string& path, const FileStamp& now, BlobIndex index,
                               const Blob& blob) {
  Status same = CompareStamps(path, blob.stamp, now);
  if (same || Passed(index, now)) return Look::kNothing;
  if (!OnlyMoved(blob.stamp, now) || Refused(index, now)) return Fail(std::move(same).error());
  if (now.mtime_ns == blob.stamp.mtime_ns) return Look::kSample;
  if (touched_ && touched_->CanTell(blob)) return Look::kAll;
  return Fail(std::move(same).error());
}

Status FileCheck::CheckAgain(const std::string& path, const FileStamp& now, BlobIndex index,
                             const Blob& blob) {
  if (Passed(index, now)) return {};
  return CompareStamps(path, blob.stamp, now);
}

// For a file of which only times moved.
Result<bool> FileCheck::IsSame(const File& file, const Blob& blob, const FileStamp& now) {
  CKPT_ASSIGN_OR_RETURN(const bool alike, HoldsFingerprint(file, blob));
  if (!alike || now.mtime_ns == blob.stamp.mtime_ns) return alike;
  if (!touched_ || !touched_->CanTell(blob)) return false;
  return touched_->IsSame(file, blob, now);
}

Status FileCheck::CheckOpen(const File& file, BlobIndex index, const Blob& blob) {
  Status same;
  for (int look = 0; look < kLooks; ++look) {
    CKPT_ASSIGN_OR_RETURN(const FileIdentity found, file.Identity());
    const FileStamp& now = found.stamp;
    same = CompareStamps(file.name(), blob.stamp, now);
    if (!same && (!OnlyMoved(blob.stamp, now) || Refused(index, now))) return same;
    if (!same && !Passed(index, now)) {
      const auto alike = IsSame(file, blob, now);
      if (!alike && alike.error().code != ErrorCode::kStale) return Fail(Error(alike.error()));
      if (alike && !*alike) {
        Refuse(index, now);
        return same;
      }
      // Nobody wrote while it was read.
      CKPT_ASSIGN_OR_RETURN(const FileIdentity after, file.Identity());
      if (!alike || !(after.stamp == now)) continue;
    }
    Pass(index, now);
    return {};
  }
  return same;
}

}  // namespace ckptfs
