// SPDX-License-Identifier: Apache-2.0

#include "formats/directory.h"

#include <algorithm>
#include <cerrno>
#include <charconv>

#include "core/io/file_root.h"

namespace ckptfs {

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

Result<int64_t> NewestEntry(const std::string& path) {
  std::vector<std::string> paths{path};
  CKPT_ASSIGN_OR_RETURN(const bool directory, IsDirectory(path));
  if (directory) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(path));
    for (const std::string& name : names) paths.push_back(path + "/" + name);
  }
  int64_t newest = 0;
  for (const std::string& one : paths) {
    CKPT_ASSIGN_OR_RETURN(const auto info, StatIfThere(one));
    if (!info) continue;
    newest = std::max(newest, int64_t{info->st_mtim.tv_sec} * 1'000'000'000 + info->st_mtim.tv_nsec);
  }
  return newest;
}

std::optional<uint64_t> TrainerIteration(std::string_view name) {
  constexpr std::string_view kPrefix = "checkpoint-";
  uint64_t iteration = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, iteration);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(iteration) : std::nullopt;
}

Result<bool> IsDirectory(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto info, StatIfThere(path));
  return info && S_ISDIR(info->st_mode);
}

Result<bool> IsRegularFile(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto info, StatIfThere(path));
  return info && S_ISREG(info->st_mode);
}

}  // namespace ckptfs
