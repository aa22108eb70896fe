// SPDX-License-Identifier: Apache-2.0

#include "core/io/searched_directories.h"

#include <sys/stat.h>
#include <sys/xattr.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>

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
  const bool acl = getxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
  return std::optional(OwnerAndMode{status.st_mode & 0777u, status.st_uid, status.st_gid, acl});
}

}  // namespace ckptfs
