// SPDX-License-Identifier: Apache-2.0

#include "core/io/open_beneath.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <string_view>

#include "core/base/strings.h"
#include "core/base/trust.h"
#include "core/io/file_stamp.h"

namespace ckptfs {
namespace {

constexpr int kMaxLinks = 40;  // as the kernel
// O_NONBLOCK: a fifo put in the file's place must not hang who opens it.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

// A descriptor of the path if it has no links; errno as openat2 says.
Descriptor OpenPlain(int root, const std::string& path, int flags) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  return Descriptor(static_cast<int>(syscall(SYS_openat2, root, path.c_str(), &how, sizeof(how))));
}

// The kernel met a link, or does not know openat2 (or a sandbox hides it).
bool NeedsWalk(int error) {
  return error == ELOOP || error == ENOSYS || error == EPERM || error == EAGAIN;
}

OwnerAndMode AccessOfPlace(int fd, const struct stat& status) {
  // f*xattr does not take descriptors that are only places.
  return AccessOf(status, HasAcl(StrCat("/proc/self/fd/", fd)));
}

Status NotRegular(const std::string& name, const struct stat& status) {
  if (S_ISREG(status.st_mode)) return {};
  return Fail(ErrorCode::kInvalid, StrCat(name, " is not a regular file"));
}

// The owner that a link counts as, with the link's group as the only one.
struct LinkOwner {
  uint32_t uid = 0;
  uint32_t gid = 0;
};

// Follows a path name by name, each one opened in the directory before it, so
// that what is exchanged meanwhile is met as a link and not followed unseen.
class Walk {
 public:
  Walk(int root, std::string name, const std::string& path) : root_(root), name_(std::move(name)) {
    Push(path);
  }

  // The file's place and the directory and name by which it was found.
  Status Run() {
    CKPT_RETURN_IF_ERROR(Enter(Descriptor(fcntl(root_, F_DUPFD_CLOEXEC, 0))));
    while (!names_.empty()) {
      const std::string name = std::move(names_.back());
      names_.pop_back();
      CKPT_RETURN_IF_ERROR(Step(name));
    }
    if (!place_.valid()) return NotRegular(name_, status_);
    return {};
  }

  FoundFile Found() {
    return FoundFile{status_, AccessOfPlace(place_.get(), status_), std::move(searched_),
                     links_ > 0};
  }
  // The file itself, still the one of its place.
  Result<OpenedFile> Opened() {
    OpenedFile opened;
    opened.file = Descriptor(openat(directory_.get(), last_.c_str(), kReadFlags | O_NOFOLLOW));
    if (!opened.file.valid()) return Fail(ErrnoError(errno, StrCat("open ", name_)));
    if (fstat(opened.file.get(), &opened.status) != 0) {
      return Fail(ErrnoError(errno, StrCat("stat ", name_)));
    }
    if (opened.status.st_dev != status_.st_dev || opened.status.st_ino != status_.st_ino) {
      return Fail(ErrorCode::kStale, StrCat(name_, " was replaced while it was being opened"));
    }
    return opened;
  }

 private:
  void Push(std::string_view path) {
    while (!path.empty()) {
      const size_t slash = path.rfind('/');
      const size_t begin = slash == std::string_view::npos ? 0 : slash + 1;
      if (begin < path.size() && path.substr(begin) != ".") names_.emplace_back(path.substr(begin));
      path = path.substr(0, slash == std::string_view::npos ? 0 : slash);
    }
  }

  // From now on names are looked up in this directory.
  Status Enter(Descriptor directory) {
    struct stat status;
    if (!directory.valid() || fstat(directory.get(), &status) != 0) {
      return Fail(ErrnoError(errno, StrCat("open ", name_)));
    }
    directory_ = std::move(directory);
    place_ = Descriptor();
    status_ = status;
    if (links_ == 0) return {};
    const OwnerAndMode access = AccessOfPlace(directory_.get(), status);
    CKPT_RETURN_IF_ERROR(MayPass(access, 1));
    searched_.push_back(access);
    return {};
  }

  Status MayPass(const OwnerAndMode& access, uint32_t bit) const {
    for (const LinkOwner& owner : owners_) {
      if (access.Lets(bit, owner.uid, {&owner.gid, 1})) continue;
      return Fail(ErrorCode::kPermission, StrCat(name_, ": a symbolic link of user ", owner.uid,
                                                 " leads to a place that this user may not open"));
    }
    return {};
  }

  Status Step(const std::string& name) {
    if (place_.valid()) return Fail(ErrnoError(ENOTDIR, StrCat("open ", name_)));
    Descriptor next(openat(directory_.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    struct stat status;
    if (!next.valid() || fstat(next.get(), &status) != 0) {
      return Fail(ErrnoError(errno, StrCat("open ", name_)));
    }
    if (S_ISLNK(status.st_mode)) return Follow(next.get(), status);
    if (S_ISDIR(status.st_mode)) return Enter(std::move(next));
    CKPT_RETURN_IF_ERROR(NotRegular(name_, status));
    if (links_ > 0) CKPT_RETURN_IF_ERROR(CheckTarget(next.get(), status));
    place_ = std::move(next);
    status_ = status;
    last_ = name;
    return {};
  }

  Status CheckTarget(int fd, const struct stat& status) const {
    struct statfs system;
    if (fstatfs(fd, &system) != 0) return Fail(ErrnoError(errno, StrCat("stat ", name_)));
    if (system.f_type == PROC_SUPER_MAGIC) {
      return Fail(ErrorCode::kPermission, StrCat(name_, ": a symbolic link into /proc"));
    }
    return MayPass(AccessOfPlace(fd, status), 4);
  }

  Status Follow(int link, const struct stat& status) {
    if (++links_ > kMaxLinks) return Fail(ErrnoError(ELOOP, StrCat("open ", name_)));
    if (!IsOwnerTrusted(status, Believed::kOwnUserOrRoot)) {
      owners_.push_back({status.st_uid, status.st_gid});
    }
    char target[PATH_MAX];
    const ssize_t length = readlinkat(link, "", target, sizeof(target));
    if (length < 0) return Fail(ErrnoError(errno, StrCat("readlink ", name_)));
    if (length == 0 || length == PATH_MAX) {
      return Fail(ErrorCode::kInvalid, StrCat(name_, ": a symbolic link that names nothing"));
    }
    const std::string_view text(target, static_cast<size_t>(length));
    Push(text);
    // Its own directory is searched by its owner, too.
    const int from = text.front() == '/' ? AT_FDCWD : directory_.get();
    const char* where = text.front() == '/' ? "/" : ".";
    return Enter(Descriptor(openat(from, where, O_PATH | O_DIRECTORY | O_CLOEXEC)));
  }

  const int root_;
  const std::string name_;          // for messages
  std::vector<std::string> names_;  // still to go, the next one last
  Descriptor directory_;
  Descriptor place_;  // of the file, once it is found
  std::string last_;  // its name in `directory_`
  struct stat status_ {};
  int links_ = 0;
  std::vector<LinkOwner> owners_;
  std::vector<OwnerAndMode> searched_;
};

}  // namespace

Result<RootDirectory> RootDirectory::Open(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(Descriptor directory, OpenDescriptor(path, O_PATH | O_DIRECTORY));
  return RootDirectory(std::move(directory), path);
}

Result<OpenedFile> RootDirectory::OpenFile(const std::string& path) const {
  OpenedFile opened;
  const std::string name = StrCat(path_, "/", path);
  opened.file = OpenPlain(directory_.get(), path, kReadFlags);
  if (!opened.file.valid()) {
    if (!NeedsWalk(errno)) return Fail(ErrnoError(errno, StrCat("open ", name)));
    Walk walk(directory_.get(), name, path);
    CKPT_RETURN_IF_ERROR(walk.Run());
    return walk.Opened();
  }
  if (fstat(opened.file.get(), &opened.status) != 0) {
    return Fail(ErrnoError(errno, StrCat("stat ", name)));
  }
  CKPT_RETURN_IF_ERROR(NotRegular(name, opened.status));
  return opened;
}

Result<FoundFile> RootDirectory::Look(const std::string& path) const {
  const std::string name = StrCat(path_, "/", path);
  const Descriptor place = OpenPlain(directory_.get(), path, O_PATH | O_CLOEXEC);
  if (!place.valid()) {
    if (!NeedsWalk(errno)) return Fail(ErrnoError(errno, StrCat("open ", name)));
    Walk walk(directory_.get(), name, path);
    CKPT_RETURN_IF_ERROR(walk.Run());
    return walk.Found();
  }
  FoundFile found;
  if (fstat(place.get(), &found.status) != 0) return Fail(ErrnoError(errno, StrCat("stat ", name)));
  CKPT_RETURN_IF_ERROR(NotRegular(name, found.status));
  found.access = AccessOfPlace(place.get(), found.status);
  return found;
}

Result<OwnerAndMode> RootDirectory::Access() const {
  struct stat status;
  if (fstat(directory_.get(), &status) != 0) return Fail(ErrnoError(errno, StrCat("stat ", path_)));
  return AccessOfPlace(directory_.get(), status);
}

Result<OpenedFile> OpenBeneath(const std::string& root, const std::string& path) {
  auto directory = RootDirectory::Open(root);
  if (!directory) return Fail(std::move(directory).error().WithContext(StrCat(root, "/", path)));
  return directory->OpenFile(path);
}

}  // namespace ckptfs
