// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/mount_path.h"

#include "core/base/strings.h"
#include "core/io/mount_info.h"
#include "mount/fuse/mount_table.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr size_t kStepParts = 4;  // run/RUN/step/ID

}  // namespace

std::string StepOfView(std::string_view view) { return MountPath{{}, {}, SplitPath(view)}.Step(); }

std::string JoinedPath(const std::vector<std::string>& parts, size_t first) {
  std::string text;
  for (size_t i = first; i < parts.size(); ++i) text += StrCat(i == first ? "" : "/", parts[i]);
  return text;
}

std::string MountPath::Step() const {
  if (parts.size() < kStepParts || parts[0] != "run" || parts[2] != "step") return "";
  return StrCat(parts[1], "/", parts[3]);
}

std::vector<std::string> MountPath::Inside() const {
  return {parts.begin() + kStepParts, parts.end()};
}

Result<MountPath> TakeApart(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const std::string absolute, AbsolutePath(path));
  CKPT_ASSIGN_OR_RETURN(const std::vector<MountEntry> mounts, ReadMounts());
  const MountEntry* found = nullptr;
  for (const MountEntry& mount : mounts) {
    if (!LiesIn(mount.mountpoint, absolute)) continue;
    const bool longer = found == nullptr || mount.mountpoint.size() >= found->mountpoint.size();
    if (longer) found = &mount;
  }
  if (found == nullptr || found->type != "fuse.ckptfs") {
    return Fail(Error{ErrorCode::kNotFound, StrCat(path, ": not in a mount of ckptfs")}.Needing(
        "give a layout, or a path below a mount point"));
  }
  const size_t below = std::min(found->mountpoint.size(), absolute.size());
  return MountPath{found->mountpoint, found->source,
                   SplitPath(std::string_view(absolute).substr(below))};
}

std::vector<std::string> SplitPath(std::string_view path) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (end > begin) parts.emplace_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace ckptfs
