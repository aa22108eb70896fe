// SPDX-License-Identifier: Apache-2.0
//
// Finding mounts and unmounting: ckptfs mounts are found in what the kernel says
// is mounted, never by touching the mount point, which may hang.
//
// Thread safety: pure functions over the kernel's state.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/io/mount_info.h"

namespace ckptfs {

// True if a path is that directory or lies below it.  REQUIRES: both absolute, without "..".
bool LiesIn(const std::string& directory, const std::string& path);

// For a FUSE mount: the user whose daemon serves it.
std::optional<uint32_t> UserOf(const MountEntry& mount);

// The topmost mount exactly at `mountpoint` (absolute, no symlinks).
Result<std::optional<MountEntry>> FindMount(const std::string& mountpoint);

// Absolute and without symlinks; a ckptfs mount's own root is not touched, since
// it may be dead or hang.
Result<std::string> MountpointPath(const std::string& path);

// True if a ckptfs mount lies there whose daemon is gone.
bool IsDeadMount(const std::string& mountpoint);

// umount(2), or fusermount3 without the privilege.  kExists while files are open;
// kPermission if it is somebody else's.
Status Unmount(const std::string& mountpoint);
// Detach now; open files keep it alive underneath.
Status UnmountLazily(const std::string& mountpoint);

// Set the kernel's read-ahead for the mount's device.  kPermission says what an
// administrator would type.  REQUIRES: not called from a request handler.
Status SetReadAhead(const std::string& mountpoint, uint64_t kibibytes);

}  // namespace ckptfs
