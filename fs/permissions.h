// SPDX-License-Identifier: Apache-2.0
//
// Who may see a step: a caller who could open every one of its source files,
// the directories above them included.  Thousands of files have few distinct
// (mode, uid, gid), so a step's rule is a short list of those.  A file or
// directory with a POSIX ACL counts as its owner's only.
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

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/store/store.h"
#include "fs/filesystem.h"

namespace ckptfs {

// One kind of gate a caller has to pass: read a file or search a directory.
struct AccessGate {
  uint32_t mode = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  bool directory = false;
  auto operator<=>(const AccessGate&) const = default;
};

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

// POSIX: the owner's bits for the owner, the group's for members, else the others'.
bool PassesGate(const AccessGate& gate, uint32_t uid, const std::vector<uint32_t>& groups);

class StepAccess {
 public:
  // `blobs` says where files lie here; directories are looked at again every
  // two seconds, files' modes are those of the manifest.
  // BLOCKS: on stat of the directories.
  StepAccess(const Step& step, const BlobReader& blobs);

  // True if the caller may see the step.  uid 0 always may.
  // BLOCKS: the first time somebody else asks, on a look at the files' ACLs.
  bool Allows(const Caller& caller, GroupCache& groups) const;

  // What attributes show: the owner and group of the sources (0 if they
  // differ) and the read bits that all sources and directories have.
  uint32_t uid() const { return uid_; }
  uint32_t gid() const { return gid_; }
  uint32_t read_bits() const { return read_bits_; }  // subset of 0444

 private:
  using Gates = std::vector<AccessGate>;
  struct File {
    AccessGate gate;
    std::string path;
  };
  void CollectDirectories(const Step& step, const BlobReader& blobs);
  void SummariseModes();
  Gates DirectoryGates() const;
  std::shared_ptr<const Gates> CurrentGates() const;

  std::vector<File> files_;               // all of them, for the look at ACLs
  std::vector<std::string> directories_;  // distinct, ancestors included
  uint32_t uid_ = 0;
  uint32_t gid_ = 0;
  uint32_t read_bits_ = 0;

  mutable Mutex mutex_;
  mutable std::shared_ptr<const Gates> file_gates_ GUARDED_BY(mutex_);
  mutable std::shared_ptr<const Gates> gates_ GUARDED_BY(mutex_);  // files and directories
  mutable std::chrono::steady_clock::time_point check_after_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
