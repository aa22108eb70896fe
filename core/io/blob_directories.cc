// SPDX-License-Identifier: Apache-2.0

#include "core/io/blob_directories.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kHexDigits = 32;
constexpr int kMaxHoldRaces = 100;
constexpr int kMaxDepth = 64;
constexpr std::string_view kSnapshots = "snapshots/";
constexpr std::string_view kPartialMark = ".partial-";
constexpr int kEnter = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

bool IsDigestName(std::string_view name) {
  return name.size() == kHexDigits && std::all_of(name.begin(), name.end(), [](char letter) {
           return IsDigit(letter) || (letter >= 'a' && letter <= 'f');
         });
}

// Returns the digest in "snapshots/<digest>", "<digest>" or "<digest>.partial-...".
std::string_view DigestNameOf(std::string_view directory) {
  if (directory.starts_with(kSnapshots)) directory.remove_prefix(kSnapshots.size());
  return directory.substr(0, kHexDigits);
}

bool IsPartial(std::string_view name) {
  return name.size() > kHexDigits && IsDigestName(name.substr(0, kHexDigits)) &&
         name.substr(kHexDigits).starts_with(kPartialMark);
}

std::string HoldPath(const std::string& store, std::string_view directory) {
  return StrCat(store, "/holds/", DigestNameOf(directory));
}

using DirectoryStream = std::unique_ptr<DIR, int (*)(DIR*)>;

DirectoryStream StreamOf(Descriptor directory) {
  DIR* const stream = fdopendir(directory.get());
  if (stream != nullptr) (void)directory.Release();
  return {stream, closedir};
}

using Visit = std::function<Status(int parent, const char* name, const struct stat& info)>;

// Every entry below an open directory, what is in one before itself.  Links are entries
// and other filesystems are not entered.
Status WalkEntries(Descriptor directory, dev_t device, int depth, const Visit& visit) {
  if (depth > kMaxDepth) return Fail(ErrorCode::kInvalid, "directories nested too deeply");
  const DirectoryStream stream = StreamOf(std::move(directory));
  if (!stream) return Fail(ErrnoError(errno, "opendir"));
  const int at = dirfd(stream.get());
  errno = 0;
  while (const dirent* const entry = readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat info {};
    if (fstatat(at, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
      return Fail(ErrnoError(errno, std::string(name)));
    }
    if (info.st_dev != device) {
      return Fail(ErrorCode::kInvalid, StrCat(name, ": another filesystem is mounted there"));
    }
    if (S_ISDIR(info.st_mode)) {
      Descriptor inner(openat(at, entry->d_name, kEnter));
      if (!inner.valid()) return Fail(ErrnoError(errno, std::string(name)));
      CKPT_RETURN_IF_ERROR(WalkEntries(std::move(inner), device, depth + 1, visit));
    }
    CKPT_RETURN_IF_ERROR(visit(at, entry->d_name, info));
    errno = 0;
  }
  if (errno != 0) return Fail(ErrnoError(errno, "readdir"));
  return {};
}

Status WalkBelow(const std::string& path, const Visit& visit) {
  Descriptor top(open(path.c_str(), kEnter));
  struct stat info {};
  if (!top.valid() || fstat(top.get(), &info) != 0) return Fail(ErrnoError(errno, path));
  const Status walked = WalkEntries(std::move(top), info.st_dev, 0, visit);
  return walked ? walked : Fail(Error(walked.error()).WithContext(path));
}

// The names in a directory that is not a link; none if there is no such directory.
Result<std::vector<std::string>> NamesIn(const std::string& path, bool directories) {
  std::vector<std::string> names;
  Descriptor top(open(path.c_str(), kEnter));
  if (!top.valid() && errno == ENOENT) return names;
  if (!top.valid()) return Fail(ErrnoError(errno, path));
  const DirectoryStream stream = StreamOf(std::move(top));
  if (!stream) return Fail(ErrnoError(errno, path));
  errno = 0;
  while (const dirent* const entry = readdir(stream.get())) {
    struct stat info {};
    const bool there = fstatat(dirfd(stream.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0;
    if (there && (directories ? S_ISDIR(info.st_mode) : S_ISREG(info.st_mode))) {
      names.emplace_back(entry->d_name);
    }
    errno = 0;
  }
  if (errno != 0) return Fail(ErrnoError(errno, path));
  return names;
}

// The directory under a new name that begins with `prefix`; who is killed from here on leaves a
// partial one.  It takes no room: the filesystem may be full.
Result<std::string> SetAside(const std::string& path, const std::string& prefix) {
  constexpr size_t kLetters = 6;
  std::string aside = StrCat(prefix, RandomDigest().Hex().substr(0, kLetters));
  if (renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, aside.c_str(), RENAME_NOREPLACE) == 0)
    return aside;
  if (errno != EINVAL && errno != EEXIST && errno != ENOSYS) return Fail(ErrnoError(errno, path));
  // A filesystem without such renames: over a new, empty one.
  aside = StrCat(prefix, "XXXXXX");
  if (mkdtemp(aside.data()) == nullptr) return Fail(ErrnoError(errno, aside));
  if (rename(path.c_str(), aside.c_str()) == 0) return aside;
  const int error = errno;
  rmdir(aside.c_str());
  return Fail(ErrnoError(error, path));
}

}  // namespace

std::string_view BlobDirectoryOf(std::string_view path) {
  const size_t skip = path.starts_with(kSnapshots) ? kSnapshots.size() : 0;
  const std::string_view name = path.substr(skip, path.find('/', skip) - skip);
  if (!IsDigestName(name) && !(skip == 0 && IsPartial(name))) return {};
  return path.substr(0, skip + name.size());
}

std::vector<std::string> BlobDirectoriesOf(const std::string& path) {
  const std::string normal = std::filesystem::path(path).lexically_normal().string();
  std::vector<std::string> found;
  for (size_t at = 0; at != std::string::npos; at = normal.find('/', at + 1)) {
    const std::string_view directory = BlobDirectoryOf(std::string_view(normal).substr(at + 1));
    if (!directory.empty()) found.emplace_back(directory);
  }
  return found;
}

Result<std::shared_ptr<const void>> HoldBlobDirectory(const std::string& store,
                                                      std::string_view directory) {
  const std::string path = HoldPath(store, directory);
  for (int race = 0; race < kMaxHoldRaces; ++race) {
    if (mkdir(StrCat(store, "/holds").c_str(), 0700) != 0 && errno != EEXIST) {
      return Fail(ErrnoError(errno, path));
    }
    CKPT_RETURN_IF_ERROR(OpenDescriptor(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
    auto held = FileLock::Take(path, O_RDWR, LOCK_SH);
    if (held) return std::shared_ptr<const void>(std::move(held));
  }
  return Fail(ErrorCode::kExhausted, StrCat(path, " is being removed all the time"));
}

std::unique_ptr<const FileLock> ClaimBlobDirectory(const std::string& store,
                                                   std::string_view directory) {
  const std::string path = HoldPath(store, directory);
  if (mkdir(StrCat(store, "/holds").c_str(), 0700) != 0 && errno != EEXIST) return nullptr;
  if (!OpenDescriptor(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600)) return nullptr;
  return FileLock::Take(path, O_RDWR, LOCK_EX | LOCK_NB);
}

Result<std::vector<std::string>> ListBlobDirectories(const std::string& store) {
  CKPT_ASSIGN_OR_RETURN(const auto top, NamesIn(store + "/blobs", true));
  CKPT_ASSIGN_OR_RETURN(const auto snapshots, NamesIn(store + "/blobs/snapshots", true));
  std::vector<std::string> found;
  for (const std::string& name : top) {
    if (IsDigestName(name) || IsPartial(name)) found.push_back(name);
  }
  for (const std::string& name : snapshots) {
    if (IsDigestName(name)) found.push_back(StrCat(kSnapshots, name));
  }
  std::sort(found.begin(), found.end());
  return found;
}

uint64_t BytesOfBlobDirectory(const std::string& store, const std::string& directory) {
  uint64_t bytes = 0;
  (void)WalkBelow(StrCat(store, "/blobs/", directory),
                  [&](int, const char*, const struct stat& info) -> Status {
                    if (S_ISREG(info.st_mode) && info.st_nlink == 1) {
                      bytes += static_cast<uint64_t>(info.st_size);
                    }
                    return {};
                  });
  return bytes;
}

Status RemoveBlobDirectory(const std::string& store, const std::string& directory) {
  const std::string blobs = store + "/blobs";
  std::string path = StrCat(blobs, "/", directory);
  if (!IsPartial(directory)) {
    CKPT_ASSIGN_OR_RETURN(
        std::string aside,
        SetAside(path, StrCat(blobs, "/", DigestNameOf(directory), kPartialMark)));
    // Before anything in it goes: its name shows all of it, or nothing.
    CKPT_RETURN_IF_ERROR(SyncPath(path.substr(0, path.rfind('/'))));
    CKPT_RETURN_IF_ERROR(SyncPath(blobs));
    path = std::move(aside);
  }
  CKPT_RETURN_IF_ERROR(
      WalkBelow(path, [](int at, const char* name, const struct stat& info) -> Status {
        if (unlinkat(at, name, S_ISDIR(info.st_mode) ? AT_REMOVEDIR : 0) == 0) return {};
        return Fail(ErrnoError(errno, name));
      }));
  if (rmdir(path.c_str()) != 0) return Fail(ErrnoError(errno, path));
  return SyncPath(blobs);
}

void RemoveUnusedHolds(const std::string& store) {
  const auto names = NamesIn(store + "/holds", false);
  const auto directories = ListBlobDirectories(store);
  if (!names || !directories) return;
  // A collector must claim a half-removed one, and may have no room for a new file.
  std::set<std::string_view> partial;
  for (const std::string_view name : *directories) {
    if (IsPartial(name)) partial.insert(DigestNameOf(name));
  }
  for (const std::string& name : *names) {
    if (!IsDigestName(name) || partial.contains(name)) continue;
    const std::string path = StrCat(store, "/holds/", name);
    const auto lock = FileLock::Take(path, O_RDWR, LOCK_EX | LOCK_NB);
    struct stat info {};
    const bool used = lstat(StrCat(store, "/blobs/", name).c_str(), &info) == 0 ||
                      lstat(StrCat(store, "/blobs/snapshots/", name).c_str(), &info) == 0;
    if (lock && !used) unlink(path.c_str());
  }
}

}  // namespace ckptfs
