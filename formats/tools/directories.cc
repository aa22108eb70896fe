// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/directories.h"

#include <algorithm>
#include <vector>

namespace ckptfs {

Result<int64_t> NewestEntry(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root.Stat(path));
  int64_t newest = itself.stamp.mtime_ns;
  if (itself.kind != EntryKind::kDirectory) return newest;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(path));
  for (const RootEntry& entry : entries) {
    CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, JoinPath(path, entry.name)));
    if (found) newest = std::max(newest, found->stamp.mtime_ns);
  }
  return newest;
}

}  // namespace ckptfs
