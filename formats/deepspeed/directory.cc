// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/directory.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace ckptfs::deepspeed {
namespace {

struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};

}  // namespace

Result<std::vector<std::string>> ListNames(const std::string& directory) {
  const std::unique_ptr<DIR, CloseDirectory> handle(::opendir(directory.c_str()));
  if (!handle) return Fail(ErrnoError(errno, directory));
  std::vector<std::string> names;
  while (true) {
    errno = 0;  // the end of the directory leaves it so
    const dirent* entry = ::readdir(handle.get());
    if (entry == nullptr && errno != 0) return Fail(ErrnoError(errno, directory));
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::optional<struct stat>> StatOf(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return Fail(ErrnoError(errno, path));
  return std::optional(info);
}

Result<std::optional<struct stat>> StatIfThere(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) return std::optional(info);
  if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == EACCES) {
    return std::optional<struct stat>();
  }
  return Fail(ErrnoError(errno, path));
}

Result<bool> IsDirectory(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto info, StatIfThere(path));
  return info && S_ISDIR(info->st_mode);
}

Result<bool> IsRegularFile(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto info, StatIfThere(path));
  return info && S_ISREG(info->st_mode);
}

}  // namespace ckptfs::deepspeed
