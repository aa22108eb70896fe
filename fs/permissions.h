// SPDX-License-Identifier: Apache-2.0
//
// A caller may see a step who could open every one of its source files, the
// directories above them included.  Thousands of files have few distinct
// (mode, uid, gid), so a step's rule is a short list of those.  A file or
// directory with a POSIX ACL counts as its owner's only.  The files count as they
// lie there, links followed; the manifest's word counts only where a file is gone.
// For files that the store copied, the directories above are those of the time of
// the copy (core/access/kept_gates.h).
//
// Thread safety: all methods may be called concurrently; no lock is held
// across I/O.
// Lifetime: StepAccess keeps nothing of the model.
// Units: modes are st_mode permission bits.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/access/access_rule.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/io/file.h"
#include "core/store/store.h"
#include "fs/types.h"

namespace ckptfs {

// Supplementary groups of processes, from /proc/<pid>/status, kept for a second.
class GroupCache {
 public:
  // The caller's gid included.  A process that cannot be read has no others.
  std::vector<uint32_t> Of(const Caller& caller);

 private:
  struct Kept {
    std::vector<uint32_t> groups;
    uint32_t uid = 0;
    uint32_t gid = 0;
    std::chrono::steady_clock::time_point until;
  };
  Mutex mutex_;
  std::map<uint32_t, Kept> kept_ GUARDED_BY(mutex_);
};

class StepAccess {
 public:
  // `blobs` says where files lie here.  Directories, and files behind symbolic
  // links, are looked at again every two seconds; other files when they are
  // opened (a new StepAccess takes their place, which tells of a change if its
  // rule is not that of `before`).
  // BLOCKS: on a look at files and directories.
  StepAccess(const Step& step, const BlobReader& blobs, const StepAccess* before = nullptr);

  // True if the caller may see the step.  uid 0 always may.
  bool Allows(const Caller& caller, GroupCache& groups) const;

  std::shared_ptr<const AccessRule> rule() const;

  // True once after what the rule shows has changed.
  bool TakeChange() const { return changed_.exchange(false); }

 private:
  struct LinkedFile {
    std::string root;
    std::string path;
  };
  void LookAtFiles(const Step& step, const BlobReader& blobs);
  std::shared_ptr<const AccessRule> MakeRule() const;

  // All distinct; filled by LookAtFiles.
  std::vector<OwnerAndMode> files_;  // of those that are not linked
  std::vector<OwnerAndMode> kept_;   // of the directories above what was copied
  std::vector<std::string> tops_;    // directories that count with all above them
  std::vector<std::string> below_;   // those below, which count by themselves
  std::vector<LinkedFile> linked_;

  mutable std::atomic<bool> changed_{false};
  mutable Mutex mutex_;
  mutable std::shared_ptr<const AccessRule> rule_ GUARDED_BY(mutex_);
  mutable std::chrono::steady_clock::time_point check_after_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
