// SPDX-License-Identifier: Apache-2.0
//
// A file's fingerprint, taken when it is adopted, tells whether it still holds
// what it held where only its change time moved (chmod, chown, a hard link):
//
//   digest of   its first 4 KiB | its last 4 KiB | blocks of 4 KiB, evenly
//               between them: one for every 16 KiB of the file, 1 to 16
//
// A file that was written anew differs in nearly all of it, hence in these blocks.
// A change in a small part of a large file may be missed.  Only a moved modification
// time tells of such a change, so no sample excuses one.
//
// Thread safety: FileCheck may be used concurrently; no lock is held across I/O.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/touched_files.h"
#include "core/io/blob.h"
#include "core/io/file.h"

namespace ckptfs {

// kDataLoss if the file became shorter.  BLOCKS: on reading.
Result<Digest> FingerprintOf(const File& file);

// The digest of the first and last 4 KiB only, as older manifests hold it.
Result<Digest> ShortFingerprintOf(const File& file);

// The comparison that a look at a file's stamp leaves open.
enum class Look {
  kNothing,  // unchanged, or found the same with these very times
  kSample,   // its change time moved: the fingerprint
  kAll,      // its modification time moved: every byte (core/blob/touched_files.h)
};

// FileCheck tells whether the files of one step are still what was adopted.
class FileCheck {
 public:
  // Without `touched` a moved modification time is a change.
  explicit FileCheck(std::shared_ptr<TouchedFiles> touched = nullptr)
      : touched_(std::move(touched)) {}

  // kStale, naming the file and what differs, if its size or inode differ; if its change
  // time and its fingerprint do; if its modification time does and some byte, or nobody
  // can tell.  The answer is remembered.
  // BLOCKS: on stat, on reading where it moved.
  Status CheckOpen(const File& file, BlobIndex index, const Blob& blob);
  // The same for the file named `path`, whose stamp is `now`, without reading it.  kStale
  // if it cannot be the same, or is known not to be.
  Result<Look> LookAt(const std::string& path, const FileStamp& now, BlobIndex index,
                      const Blob& blob);
  // The same for the file named `path`, whose stamp is `now`.  kStale also if its times
  // moved since the last look: what was read meanwhile may be of two states.
  Status CheckAgain(const std::string& path, const FileStamp& now, BlobIndex index,
                    const Blob& blob);

  // How many files were opened, touched, and found the same: what was read of one
  // before may be of a state that nobody compared.
  uint64_t moved() const { return moved_.load(std::memory_order_acquire); }

 private:
  bool Passed(BlobIndex index, const FileStamp& now);
  void Pass(BlobIndex index, const FileStamp& now);
  bool Refused(BlobIndex index, const FileStamp& now);
  void Refuse(BlobIndex index, const FileStamp& now);
  Result<bool> IsSame(const File& file, const Blob& blob, const FileStamp& now);

  const std::shared_ptr<TouchedFiles> touched_;
  std::atomic<uint64_t> moved_{0};
  Mutex mutex_;
  // As they were when they were opened last; as they were when their bytes were others.
  std::unordered_map<uint32_t, FileStamp> passed_ GUARDED_BY(mutex_);
  std::unordered_map<uint32_t, FileStamp> refused_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
