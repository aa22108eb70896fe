// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/directory.h"

#include <cerrno>

#include "core/io/file_root.h"

namespace ckptfs::deepspeed {

Result<std::vector<std::string>> ListNames(const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(std::vector<RootEntry> entries, ListDirectory(directory, false));
  std::vector<std::string> names;
  for (RootEntry& entry : entries) names.push_back(std::move(entry.name));
  return names;
}

Result<TorchFile> OpenTorch(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenLocalFile(path));
  return TorchFile::Open(*file);
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
