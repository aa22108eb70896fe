// SPDX-License-Identifier: Apache-2.0

#include "core/access/searched_directories.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <string_view>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/file_stamp.h"

namespace ckptfs {
namespace {

// `path` and all directories above it.
void AddAncestors(std::string_view path, std::set<std::string>& out) {
  while (!path.empty() && path != "/") {
    if (!out.emplace(path).second) return;
    const size_t slash = path.rfind('/');
    if (slash == std::string_view::npos) return;
    path = path.substr(0, slash);
  }
  out.emplace("/");
}

}  // namespace

void AddSearched(const std::string& directory, std::set<std::string>& out) {
  AddAncestors(directory, out);
  char* real = realpath(directory.c_str(), nullptr);
  if (real == nullptr) return;
  AddAncestors(real, out);
  std::free(real);
}

Result<std::optional<OwnerAndMode>> AccessOfDirectory(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return Fail(ErrnoError(errno, path));
  if (!S_ISDIR(status.st_mode)) return std::optional<OwnerAndMode>();
  return std::optional(AccessOf(status, HasAcl(path)));
}

std::vector<std::string> WorkingDirectories() {
  std::vector<std::string> paths;
  const auto processes = ListDirectory("/proc", false);
  for (const RootEntry& process : processes ? *processes : std::vector<RootEntry>()) {
    if (!IsDigit(process.name.front())) continue;
    char path[PATH_MAX];
    const ssize_t length =
        readlink(StrCat("/proc/", process.name, "/cwd").c_str(), path, sizeof(path));
    if (length > 0) paths.emplace_back(path, static_cast<size_t>(length));
  }
  return paths;
}

}  // namespace ckptfs
