// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/closed_file.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <utility>

#include "core/access/kept_gates.h"
#include "core/access/searched_directories.h"
#include "core/base/strings.h"
#include "core/io/open_beneath.h"
#include "core/io/root.h"

namespace ckptfs {
namespace {

// One class of users, by its bits.
struct Users {
  uint32_t read;
  uint32_t search;
};
constexpr Users kGroup{040, 010};
constexpr Users kOthers{04, 01};

struct Found {
  std::vector<std::pair<std::string, OwnerAndMode>> files;
  std::vector<OwnerAndMode> directories;
};

void LookAtDirectories(const std::set<std::string>& paths, Found& found) {
  for (const std::string& path : paths) {
    const auto access = AccessOfDirectory(path);
    if (access && *access) found.directories.push_back(**access);
  }
}

// Adds the directories that count: for a copy in the store, those above its source.
void LookAtRoot(const Blob& blob, const std::string& path, std::set<std::string>& searched,
                Found& found) {
  if (!blob.store_owned) return AddSearched(path, searched);
  const auto kept = ReadKeptGates(path);
  if (kept) found.directories.insert(found.directories.end(), kept->begin(), kept->end());
  if (!kept) found.directories.push_back(OwnerAndMode{});  // its owner's alone
}

Found LookAt(const StepModel& step, const BlobReader& blobs) {
  Found found;
  std::set<std::string> searched;
  std::map<std::string, Result<RootDirectory>> roots;
  for (size_t i = 0; i < step.blobs.size(); ++i) {
    const Blob& blob = step.blobs[i];
    const BlobIndex index{static_cast<uint32_t>(i)};
    if (blob.side || !blobs.RootOf(index).local()) continue;
    const std::string& path = blobs.RootOf(index).name();
    auto root = roots.find(path);
    if (root == roots.end()) {
      root = roots.emplace(path, RootDirectory::Open(path)).first;
      LookAtRoot(blob, path, searched, found);
    }
    const auto file = root->second ? root->second->Look(blob.path) : Fail(root->second.error());
    if (!file) continue;
    found.files.emplace_back(blobs.PathOf(index), file->access);
    found.directories.insert(found.directories.end(), file->searched.begin(), file->searched.end());
    for (std::string folder = ParentPath(blob.path); !folder.empty(); folder = ParentPath(folder)) {
      if (!searched.insert(JoinPath(path, folder)).second) break;
    }
  }
  LookAtDirectories(searched, found);
  return found;
}

bool AllSearch(const Found& found, Users users) {
  return std::ranges::all_of(found.directories, [&](const OwnerAndMode& directory) {
    return (directory.CertainMode() & users.search) != 0;
  });
}

bool MayRead(const OwnerAndMode& file, Users users) {
  return (file.CertainMode() & users.read) != 0;
}

}  // namespace

std::optional<ClosedFile> FindClosedFile(const StepModel& step, const BlobReader& blobs) {
  const Found found = LookAt(step, blobs);
  for (const Users users : {kOthers, kGroup}) {
    if (!AllSearch(found, users)) continue;
    ClosedFile closed;
    size_t open = 0, shared = 0;
    for (const auto& [path, access] : found.files) {
      open += MayRead(access, users) ? 1 : 0;
      shared += MayRead(access, kGroup) ? 1 : 0;
      if (MayRead(access, users) || closed.more++ > 0) continue;
      closed.path = path;
      closed.access = access;
    }
    if (closed.more == 0) continue;
    --closed.more;
    const bool on_purpose =
        open == 0 && (shared == found.files.size() || users.read == kGroup.read);
    if (!on_purpose) return closed;
  }
  return std::nullopt;
}

std::string DescribeClosedFile(const ClosedFile& file) {
  constexpr uint32_t kPermissions = 07777;
  char mode[8];
  std::snprintf(mode, sizeof mode, "%04o", file.access.mode & kPermissions);
  const std::string group =
      MayRead(file.access, kGroup) ? StrCat(" and group ", file.access.gid) : std::string();
  const std::string others =
      file.more == 0 ? "" : StrCat(", and ", file.more, " more of its files");
  return StrCat(
      "only user ", file.access.uid, group, " may read ", file.path, " (mode ", mode, ")", others,
      "; `chmod a+r` and `ckptfs adopt --refresh` show the step to all who may search its "
      "directories");
}

}  // namespace ckptfs
