// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/step_directories.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "core/base/strings.h"
#include "formats/deepspeed/names.h"

namespace ckptfs::deepspeed {
namespace {

struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};

// Newest modification of a directory's direct entries.
int64_t NewestEntry(const std::string& directory) {
  const std::unique_ptr<DIR, CloseDirectory> handle(::opendir(directory.c_str()));
  int64_t newest = 0;
  while (const dirent* entry = handle ? ::readdir(handle.get()) : nullptr) {
    struct stat info {};
    if (std::string_view(entry->d_name) == "..") continue;
    if (::stat(StrCat(directory, "/", entry->d_name).c_str(), &info) != 0) continue;
    newest = std::max(newest, int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec);
  }
  return newest;
}

std::string LastComponent(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

StepCandidate CandidateOf(const std::string& directory, const std::string& root) {
  StepCandidate out;
  out.directory = directory;
  out.root = root;
  out.id = LastComponent(directory);
  out.iteration = IterationOfTag(out.id);
  out.mtime_ns = NewestEntry(directory);
  return out;
}

Result<std::vector<std::string>> Subdirectories(const std::string& path) {
  const std::unique_ptr<DIR, CloseDirectory> handle(::opendir(path.c_str()));
  if (!handle) return Fail(ErrnoError(errno, path));
  std::vector<std::string> out;
  while (const dirent* entry = ::readdir(handle.get())) {
    const std::string name = entry->d_name;
    struct stat info {};
    if (name == "." || name == "..") continue;
    if (::stat(StrCat(path, "/", name).c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) continue;
    out.push_back(name);
  }
  std::sort(out.begin(), out.end());
  return out;
}

bool IsDirectory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

}  // namespace

bool HasUniversalStates(const std::string& directory) {
  return IsDirectory(StrCat(directory, "/zero"));
}

Result<std::vector<StepCandidate>> FindSteps(const std::string& path, std::string_view pointer,
                                             const IsStep& is_step) {
  std::vector<StepCandidate> out;
  CKPT_ASSIGN_OR_RETURN(const bool itself, is_step(path));
  if (itself) {
    out.push_back(CandidateOf(path, path));
    return out;
  }
  CKPT_ASSIGN_OR_RETURN(const auto latest, ReadPointer(StrCat(path, "/", pointer)));
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Subdirectories(path));
  for (const std::string& name : names) {
    const std::string directory = StrCat(path, "/", name);
    CKPT_ASSIGN_OR_RETURN(const bool step, is_step(directory));
    if (!step) continue;
    out.push_back(CandidateOf(directory, path));
    out.back().latest = latest == name;
  }
  if (latest && !IsDirectory(StrCat(path, "/", *latest))) {
    return Fail(ErrorCode::kInvalid, StrCat(path, "/", pointer, ": names the tag '", *latest,
                                            "', and there is no such directory"));
  }
  return out;
}

}  // namespace ckptfs::deepspeed
