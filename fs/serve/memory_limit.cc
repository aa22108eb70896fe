// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string_view>

#include "core/base/strings.h"
#include "core/io/mount_info.h"

namespace ckptfs {
namespace {

// A mounted hierarchy that can limit memory.
struct Hierarchy {
  std::string group;  // of the hierarchy, that is seen at `mountpoint`
  std::string mountpoint;
  std::string_view limit;  // the file's name
};

std::optional<Hierarchy> HierarchyOf(const MountEntry& mount) {
  if (mount.type == "cgroup2") return Hierarchy{mount.root, mount.mountpoint, "memory.max"};
  if (mount.type == "cgroup" && MountOption(mount.options, "memory")) {
    return Hierarchy{mount.root, mount.mountpoint, "memory.limit_in_bytes"};
  }
  return std::nullopt;
}

// Our group in the hierarchy, of /proc/self/cgroup: "id:controllers:path".
std::optional<std::string> GroupIn(const std::string& root, bool unified) {
  std::ifstream membership(StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(membership, line);) {
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool wanted =
        unified ? controllers.empty() : MountOption(controllers, "memory").has_value();
    if (wanted) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The least limit of the group and those above it, as far as they are mounted.
uint64_t LeastLimit(const std::string& root, const Hierarchy& mount, std::string group) {
  // The mounted cgroup tree is often our own container's part; from inside a container
  // with other names the group's path may not lead through it.
  const std::string top = mount.group == "/" ? "" : mount.group;
  const bool inside = group == top || group.starts_with(top + "/");
  group = inside ? group.substr(top.size()) : "";
  while (!group.empty() && group.back() == '/') group.pop_back();
  uint64_t least = UINT64_MAX;
  while (true) {
    std::ifstream file(StrCat(root, mount.mountpoint, group, "/", mount.limit));
    uint64_t bytes = 0;
    if (file >> bytes) least = std::min(least, bytes);  // "max" is not a number
    if (group.empty()) return least;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

uint64_t GroupMemoryLimit(const std::string& root) {
  uint64_t least = UINT64_MAX;
  const auto mounts = ReadMounts(StrCat(root, "/proc/self/mountinfo"));
  if (!mounts) return least;
  for (const MountEntry& entry : *mounts) {
    const auto mount = HierarchyOf(entry);
    if (!mount) continue;
    const auto group = GroupIn(root, mount->limit == "memory.max");
    if (group) least = std::min(least, LeastLimit(root, *mount, *group));
  }
  return least;
}

}  // namespace ckptfs
