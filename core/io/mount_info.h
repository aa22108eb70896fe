// SPDX-License-Identifier: Apache-2.0
//
// ReadMounts lists what the kernel has mounted: /proc/self/mountinfo, parsed by libmount.
//
// Thread safety: a pure function over a file.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

struct MountEntry {
  std::string device;      // "major:minor", names the bdi in sysfs
  std::string root;        // the directory of the file system that is seen
  std::string mountpoint;  // absolute, unescaped
  std::string type;        // "fuse.ckptfs"
  std::string source;
  std::string options;  // of the file system, not of the mount: "rw,user_id=1000"
};

// In the kernel's order: of two mounts at one place the later is on top.  Lines
// that are malformed are skipped.  `file` is a mountinfo file (man 5 proc).
Result<std::vector<MountEntry>> ReadMounts(const std::string& file = "/proc/self/mountinfo");

// The value of `key` in a comma-separated list of options (or of a cgroup's
// controllers); "" for a bare word.
std::optional<std::string> MountOption(const std::string& options, const char* key);

}  // namespace ckptfs
