// SPDX-License-Identifier: Apache-2.0
//
// BackingIds registers passthrough files with the kernel.  The kernel demands
// that all open files of an inode share one backing id, so ids are counted per
// (inode, backing token) and closed with the last handle.
//
// Thread safety: all methods may be called concurrently.  The lock is held over
// the registering ioctl on purpose: two opens of an inode must end with one id,
// and the ioctl waits for no request.
// Lifetime: ids die with the FUSE connection, not with the process; nothing is left to do then.

#pragma once

#include <fuse_lowlevel.h>

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/base/mutex.h"
#include "fs/types.h"

namespace ckptfs {

class BackingIds {
 public:
  // The id for `file`, which Release gives back; 0 with errno set if the kernel
  // refuses.  REQUIRES: file.backing_fd >= 0.
  int Acquire(fuse_req_t request, InodeNumber inode, const OpenFile& file);

  // The ids of handles, for the process that serves the connection next.
  std::map<uint64_t, int> All() const;
  // The handle has this id from a process that served the connection before.
  void Restore(InodeNumber inode, const OpenFile& file, int id);

  // Nothing happens for a handle without an id.
  void Release(fuse_req_t request, FileHandle handle);

 private:
  using Key = std::pair<InodeNumber, uint64_t>;  // inode, backing token
  struct Counted {
    int id = 0;
    uint64_t handles = 0;
  };

  mutable Mutex mutex_;
  std::map<Key, Counted> ids_ GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Key> handles_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
