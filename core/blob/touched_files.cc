// SPDX-License-Identifier: Apache-2.0

#include "core/blob/touched_files.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_stamp.h"

namespace ckptfs {
namespace {

using Clock = std::chrono::steady_clock;

// Clocks of files tick every few milliseconds: a write in the tick in which a file
// was looked at would leave its times as they are.
constexpr int64_t kTickNs = 50'000'000;

void LetTickPass(const FileStamp& stamp) {
  const int64_t age = NowNs() - stamp.ctime_ns;
  if (age < kTickNs) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kTickNs - age, kTickNs)));
  }
}

Status CheckUnmoved(const File& file, const FileStamp& was) {
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file.Identity());
  if (identity.stamp == was) return {};
  return Fail(ErrorCode::kStale, StrCat(file.name(),
                                        " changed while it was being compared "
                                        "with the adopted file"));
}

Digest KeyOfVerdict(const std::string& name, const Blob& blob, const FileStamp& now) {
  const FileStamp& was = blob.stamp;
  return DigestOf(StrCat(name, "\n", was.size, " ", was.mtime_ns, " ", was.ctime_ns, " ", was.inode,
                         " ", blob.fingerprint.Hex(), " ", blob.frame.Hex(), "\n", now.size, " ",
                         now.mtime_ns, " ", now.ctime_ns, " ", now.inode));
}

Result<bool> HoldsChunks(const File& file, const Blob& blob, const std::function<Status()>& go_on) {
  ChunkDigester digester(blob.chunk_bytes);
  CKPT_RETURN_IF_ERROR(ReadAllOf(file, [&](uint64_t, std::span<const std::byte> bytes) {
    digester.Add(bytes);
    return go_on();
  }));
  return HasChunks(blob, std::move(digester).Finish());
}

}  // namespace

bool TouchedFiles::CanTell(const Blob& blob) const {
  return blob.chunk_bytes != 0 || (blob.frame != Digest{} && options_.records != nullptr);
}

Result<bool> TouchedFiles::Compare(const File& file, const Blob& blob, const FileStamp& now) const {
  const auto go_on = [&] { return CheckUnmoved(file, now); };
  if (blob.chunk_bytes != 0) return HoldsChunks(file, blob, go_on);
  // Its structure is read again, by which its frame is told; shared for the call only.
  const std::shared_ptr<const File> borrowed(std::shared_ptr<void>(), &file);
  auto records = options_.records(borrowed);
  if (!records) {
    if (records.error().code == ErrorCode::kInvalid) return false;
    return Fail(std::move(records).error());
  }
  return HoldsFrame(file, blob.frame, *std::move(records), go_on);
}

Result<bool> TouchedFiles::CompareOnce(const File& file, const Blob& blob, const FileStamp& now) {
  LetTickPass(now);
  const auto begin = Clock::now();
  CKPT_RETURN_IF_ERROR(CheckUnmoved(file, now));
  CKPT_ASSIGN_OR_RETURN(const bool same, Compare(file, blob, now));
  CKPT_RETURN_IF_ERROR(CheckUnmoved(file, now));
  files_read_.fetch_add(1, std::memory_order_relaxed);
  bytes_read_.fetch_add(file.size(), std::memory_order_relaxed);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
  if (options_.say) {
    options_.say(StrCat(file.name(), " was touched since it was adopted; all of its ", file.size(),
                        " bytes were compared in ", took.count(),
                        " ms: ", same ? "they are unchanged" : "they have changed"));
  }
  return same;
}

Result<bool> TouchedFiles::IsSame(const File& file, const Blob& blob, const FileStamp& now) {
  const Digest key = KeyOfVerdict(file.name(), blob, now);
  return known_.Get(key, [&] { return CompareOnce(file, blob, now); });
}

}  // namespace ckptfs
