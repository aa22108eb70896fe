// SPDX-License-Identifier: Apache-2.0

#include "core/io/file_stamp.h"

#include <sys/xattr.h>
#include <time.h>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

int64_t Nanoseconds(const struct timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

FileStamp StampOf(const struct stat& status) {
  return FileStamp{static_cast<uint64_t>(status.st_size), Nanoseconds(status.st_mtim),
                   Nanoseconds(status.st_ctim), static_cast<uint64_t>(status.st_ino)};
}

Status CompareStamps(const std::string& path, const FileStamp& adopted, const FileStamp& now) {
  const bool compare_ctime = adopted.ctime_ns != 0;
  FileStamp comparable = now;
  if (!compare_ctime) comparable.ctime_ns = 0;
  if (adopted.size_only()) comparable = BlobStamp{now.size, 0, 0, 0};
  if (adopted == comparable) return {};
  std::string differences;
  const auto compare = [&differences](std::string_view what, auto was, auto is) {
    if (was == is) return;
    differences += StrCat(differences.empty() ? "" : ", ", what, " was ", was, " and is ", is);
  };
  compare("size", adopted.size, now.size);
  compare("mtime", adopted.mtime_ns, comparable.mtime_ns);
  compare("ctime", adopted.ctime_ns, comparable.ctime_ns);
  compare("inode", adopted.inode, comparable.inode);
  return Fail(ErrorCode::kStale, StrCat(path, " changed since it was adopted: ", differences));
}

OwnerAndMode AccessOf(const struct stat& status, bool acl) {
  return OwnerAndMode{status.st_mode & 0777u, status.st_uid, status.st_gid, acl};
}

bool HasAcl(const std::string& path) {
  return getxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
}

int64_t NowNs() {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return Nanoseconds(now);
}

}  // namespace ckptfs
