// SPDX-License-Identifier: Apache-2.0
//
// TouchedFiles tells, of files of which times moved and nothing else, whether each
// byte is what it was when they were adopted.  It reads the whole file, once for each
// time it moved and for all who want to know, against digests of that time: those of
// the blob's chunks, or that of its frame (core/blob/frame.h).  No sample would do:
// `touch` changes no byte, but a moved modification time is all that tells of a byte
// that somebody changed.
//
// Thread safety: all methods may be called concurrently; no lock is held across I/O.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "core/base/loading_cache.h"
#include "core/base/result.h"
#include "core/blob/frame.h"
#include "core/blob/record_sums.h"
#include "core/io/blob.h"
#include "core/io/file.h"

namespace ckptfs {

class TouchedFiles {
 public:
  struct Options {
    RecordsOf records;  // absent: only files with digests of their chunks are told
    std::function<void(std::string_view)> say;  // a line for each file that was read
  };
  explicit TouchedFiles(Options options) : options_(std::move(options)) {}

  // True if there is something to compare the file's bytes with.
  bool CanTell(const Blob& blob) const;

  // True if the file, whose stamp is `now`, holds what was adopted.  kStale if it changes
  // meanwhile.  REQUIRES: CanTell.  BLOCKS: on reading all of it.
  Result<bool> IsSame(const File& file, const Blob& blob, const FileStamp& now);

  uint64_t files_read() const { return files_read_.load(std::memory_order_relaxed); }
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct HashKey {
    size_t operator()(const Digest& key) const { return static_cast<size_t>(key.low); }
  };
  static constexpr uint64_t kRemembered = 1 << 16;

  Result<bool> Compare(const File& file, const Blob& blob, const FileStamp& now) const;
  Result<bool> CompareOnce(const File& file, const Blob& blob, const FileStamp& now);

  const Options options_;
  LoadingCache<Digest, bool, HashKey> known_{kRemembered};
  std::atomic<uint64_t> files_read_{0};
  std::atomic<uint64_t> bytes_read_{0};
};

}  // namespace ckptfs
