// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says is mounted, and unmounting: ckptfs mounts are found in
// /proc/self/mountinfo, never by touching the mount point, which may hang.
//
// Thread safety: pure functions over the kernel's state.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

struct MountEntry {
  std::string device;      // "major:minor", names the bdi in sysfs
  std::string mountpoint;  // absolute, unescaped
  std::string type;        // "fuse.ckptfs"
  std::string source;
  std::optional<uint32_t> user;  // of a FUSE mount: whose daemon it is
};

// In the kernel's order: of two mounts at one place the later is on top.
Result<std::vector<MountEntry>> ReadMounts();

// Parses mountinfo text (man 5 proc); malformed lines are skipped.
std::vector<MountEntry> ParseMountInfo(const std::string& text);

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
