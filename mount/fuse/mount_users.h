// SPDX-License-Identifier: Apache-2.0
//
// FindMountUsers lists the processes that use files below a directory of a mount: open files,
// mapped files and working directories, as /proc tells of them; and those with a copy of the mount.
// It touches nothing in the mount.
//
// Thread safety: pure functions over the kernel's state.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace ckptfs {

struct MountUser {
  int pid = 0;
  std::string name;                // of the process, as it says itself
  std::vector<std::string> files;  // relative to the directory, sorted, each once; "." is itself
};

// Those that this user may look at (root: all), by pid.  `directory` is absolute.
std::vector<MountUser> FindMountUsers(const std::string& directory);

// Those with the file system of `device` ("major:minor") among the mounts of a mount namespace that
// is not this process's, by pid and without files: where it was copied (unshare -m, containers) an
// unmount here takes nothing away.  Only processes that this user may look at are found.
std::vector<MountUser> FindMountHolders(const std::string& device);

// "python3 (pid 4711: view/tp2/rank0/model.pt and 3 more), bash (pid 12: .)", without files "sleep
// (pid 13)"; at most a few.
std::string DescribeUsers(const std::vector<MountUser>& users);
nlohmann::json UsersJson(const std::vector<MountUser>& users);

}  // namespace ckptfs
