// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/backing_ids.h"

#include "mount/fuse/fuse_features.h"

namespace ckptfs {

int BackingIds::Acquire(fuse_req_t request, InodeNumber inode, const OpenFile& file) {
  const Key key{inode, file.backing_token};
  MutexLock lock(mutex_);
  Counted& counted = ids_[key];
  if (counted.handles == 0) {
    counted.id = OpenBacking(request, file.backing_fd);
    if (counted.id <= 0) {
      ids_.erase(key);
      return 0;
    }
  }
  ++counted.handles;
  handles_[static_cast<uint64_t>(file.handle)] = key;
  return counted.id;
}

std::map<uint64_t, int> BackingIds::All() const {
  std::map<uint64_t, int> all;
  MutexLock lock(mutex_);
  for (const auto& [handle, key] : handles_) all[handle] = ids_.at(key).id;
  return all;
}

void BackingIds::Restore(InodeNumber inode, const OpenFile& file, int id) {
  const Key key{inode, file.backing_token};
  MutexLock lock(mutex_);
  Counted& counted = ids_[key];
  counted.id = id;
  ++counted.handles;
  handles_[static_cast<uint64_t>(file.handle)] = key;
}

void BackingIds::Release(fuse_req_t request, FileHandle handle) {
  MutexLock lock(mutex_);
  const auto found = handles_.find(static_cast<uint64_t>(handle));
  if (found == handles_.end()) return;
  const auto counted = ids_.find(found->second);
  if (--counted->second.handles == 0) {
    CloseBacking(request, counted->second.id);
    ids_.erase(counted);
  }
  handles_.erase(found);
}

}  // namespace ckptfs
