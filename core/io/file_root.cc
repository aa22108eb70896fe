// SPDX-License-Identifier: Apache-2.0

#include "core/io/file_root.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "core/base/strings.h"
#include "core/io/file_stamp.h"
#include "core/io/local_file.h"
#include "core/io/open_beneath.h"

namespace ckptfs {
namespace {

struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};

// There is nothing that we can see: nothing at all, or a link that leads nowhere
// or where we may not go.
bool IsNothing(int error) {
  return error == ENOENT || error == ENOTDIR || error == ELOOP || error == EACCES ||
         error == ENAMETOOLONG;
}

Result<std::string> LinkAt(int directory, const char* name) {
  char target[PATH_MAX];
  const ssize_t length = ::readlinkat(directory, name, target, sizeof(target));
  if (length < 0) return Fail(ErrnoError(errno, name));
  return std::string(target, static_cast<size_t>(length));
}

// Returns the kind of an entry; some filesystems do not say it in the listing.
Result<RootEntry> EntryOf(int directory, const dirent& found, bool follow) {
  RootEntry entry{found.d_name, EntryKind::kOther, {}};
  if (found.d_type == DT_REG) entry.kind = EntryKind::kFile;
  if (found.d_type == DT_DIR) entry.kind = EntryKind::kDirectory;
  if (found.d_type != DT_UNKNOWN && found.d_type != DT_LNK) return entry;
  struct stat status;
  bool there = ::fstatat(directory, found.d_name, &status, AT_SYMLINK_NOFOLLOW) == 0;
  if (there && S_ISLNK(status.st_mode)) {
    CKPT_ASSIGN_OR_RETURN(entry.link, LinkAt(directory, found.d_name));
    if (!follow) return entry;
    there = ::fstatat(directory, found.d_name, &status, 0) == 0;
  }
  if (there) entry.kind = KindOf(status);
  if (!there && !IsNothing(errno)) return Fail(ErrnoError(errno, found.d_name));
  return entry;
}

EntryStat StatOf(const struct stat& status) {
  return EntryStat{KindOf(status), StampOf(status), AccessOf(status)};
}

}  // namespace

Result<std::vector<RootEntry>> ListDirectory(const std::string& path, bool follow, size_t most) {
  const std::unique_ptr<DIR, CloseDirectory> handle(::opendir(path.c_str()));
  if (!handle) return Fail(ErrnoError(errno, path));
  std::vector<RootEntry> entries;
  while (true) {
    errno = 0;  // the end of the directory leaves it so
    const dirent* entry = ::readdir(handle.get());
    if (entry == nullptr && errno != 0) return Fail(ErrnoError(errno, path));
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (entries.size() == most) {
      return Fail(ErrorCode::kUnsupported, StrCat(path, ": more than ", most,
                                                  " entries; ckptfs does not look into such a "
                                                  "directory"));
    }
    auto described = EntryOf(::dirfd(handle.get()), *entry, follow);
    if (!described) return Fail(std::move(described).error().WithContext(path));
    entries.push_back(*std::move(described));
  }
  std::sort(entries.begin(), entries.end(),
            [](const RootEntry& a, const RootEntry& b) { return a.name < b.name; });
  return entries;
}

Result<std::shared_ptr<const File>> OpenLocalFile(const std::string& path) {
  // O_NONBLOCK: a fifo in the file's place must not hang who opens it.
  CKPT_ASSIGN_OR_RETURN(Descriptor file, OpenDescriptor(path, O_RDONLY | O_NONBLOCK | O_NOCTTY));
  struct stat status;
  if (::fstat(file.get(), &status) != 0) return Fail(ErrnoError(errno, StrCat("stat ", path)));
  return LocalFile::Make(std::move(file), status, path);
}

Result<std::vector<RootEntry>> FileRoot::List(std::string_view path) const {
  if (!path.empty()) CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  return ListDirectory(PathOf(path), true);
}

Result<EntryStat> FileRoot::Stat(std::string_view path) const {
  if (!path.empty()) CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  const std::string full = PathOf(path);
  struct stat status;
  // One call where there is no link, which is nearly everywhere.
  if (::lstat(full.c_str(), &status) != 0) return Fail(ErrnoError(errno, full));
  if (!S_ISLNK(status.st_mode)) return StatOf(status);
  if (::stat(full.c_str(), &status) != 0) return Fail(ErrnoError(errno, full));
  if (!S_ISREG(status.st_mode) || path.empty()) return StatOf(status);
  CKPT_ASSIGN_OR_RETURN(const RootDirectory root, RootDirectory::Open(name()));
  CKPT_ASSIGN_OR_RETURN(const FoundFile found, root.Look(std::string(path)));
  EntryStat linked = StatOf(found.status);
  linked.access = found.access;
  linked.linked = found.linked;
  linked.searched = found.searched;
  return linked;
}

Result<std::shared_ptr<const File>> FileRoot::Open(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  CKPT_ASSIGN_OR_RETURN(OpenedFile opened, OpenBeneath(name(), std::string(path)));
  return LocalFile::Make(std::move(opened.file), opened.status, PathOf(path));
}

}  // namespace ckptfs
