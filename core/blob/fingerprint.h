// SPDX-License-Identifier: Apache-2.0
//
// A file's fingerprint, taken when it is adopted, tells whether it still holds
// what it held where only its change time moved (chmod, chown, a hard link):
//
//   digest of   its first 4 KiB | its last 4 KiB | blocks of 4 KiB, evenly
//               between them: one for every 16 KiB of the file, 1 to 16
//
// A file that was written anew differs in nearly all of it, hence in these.
// What is changed in a small part of a large file may be missed; `verify` reads
// all.
//
// Thread safety: FileCheck may be used concurrently; no lock is held across I/O.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/blob.h"
#include "core/io/file.h"

namespace ckptfs {

// kDataLoss if the file became shorter.  BLOCKS: on reading.
Result<Digest> FingerprintOf(const File& file);

// Of the first and last 4 KiB only, as manifests of before hold it.
Result<Digest> ShortFingerprintOf(const File& file);

// Whether the files of one step are still what was adopted.
class FileCheck {
 public:
  // kStale, naming the file and what differs, if its size, inode or modification
  // time differ, or its change time and its fingerprint.  What was excused is
  // remembered.
  // BLOCKS: on stat, on reading where it moved.
  Status CheckOpen(const File& file, BlobIndex index, const Blob& blob);
  // Whether these very times of the file were excused.
  bool IsExcused(BlobIndex index, const FileStamp& now);
  // Of the file named `path`, which is `now`: kStale also if its times moved since
  // it was looked at last: what was read of it meanwhile may be of two states.
  Status CheckAgain(const std::string& path, const FileStamp& now, BlobIndex index,
                    const Blob& blob);

 private:
  Mutex mutex_;
  std::unordered_map<uint32_t, FileStamp> excused_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
