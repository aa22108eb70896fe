// SPDX-License-Identifier: Apache-2.0

#include "mount/mirror/mirror.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/limits.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Flags of an open that are the opener's own; creating and following are done here, and direct
// I/O is the kernel's part (requests that come here have no aligned memory).
constexpr int kOpenersFlags = O_ACCMODE | O_APPEND | O_TRUNC | O_SYNC | O_DSYNC;
constexpr ino_t kStatusInode = ~ino_t{0} >> 1;

bool IsStatus(MirrorId parent, const std::string& name) {
  return parent == kMirrorRoot && name == Mirror::kStatusName;
}

bool IsShown(std::string_view attribute) {
  return attribute.starts_with("user.") || attribute == "system.posix_acl_access" ||
         attribute == "system.posix_acl_default";
}

// Returns what the call says, or its errno.
Errno<int> Checked(int result) {
  if (result < 0) return FailErrno(errno);
  return result;
}

Errno<struct stat> StatOf(int fd) {
  struct stat status {};
  MIRROR_RETURN_IF_ERROR(Checked(::fstatat(fd, "", &status, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW)));
  return status;
}

// Opens what a place leads to, which the caller of this acts for.
Errno<Descriptor> OpenPlace(const Descriptor& place, int flags) {
  Descriptor file(::open(PathOfPlace(place.get()).c_str(), flags | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) return FailErrno(errno);
  return file;
}

ErrnoStatus ChangeSize(const Descriptor& place, const MirrorFile* open, off_t size) {
  if (open != nullptr && open->writes) {
    MIRROR_RETURN_IF_ERROR(Checked(::ftruncate(open->file.get(), size)));
    return {};
  }
  MIRROR_ASSIGN_OR_RETURN(const Descriptor file, OpenPlace(place, O_WRONLY));
  MIRROR_RETURN_IF_ERROR(Checked(::ftruncate(file.get(), size)));
  return {};
}

}  // namespace

Mirror::Mirror(std::unique_ptr<MirrorNodes> nodes, StatusText status, struct stat top)
    : nodes_(std::move(nodes)), status_(std::move(status)), top_(top) {}

Result<std::unique_ptr<Mirror>> Mirror::Open(const std::string& directory, size_t descriptors,
                                             StatusText status) {
  CKPT_ASSIGN_OR_RETURN(Descriptor root, OpenDescriptor(directory, O_PATH | O_DIRECTORY));
  struct stat top {};
  if (::fstat(root.get(), &top) != 0) return Fail(ErrnoError(errno, directory));
  auto nodes = MirrorNodes::Create(std::move(root), descriptors);
  if (!nodes) return Fail(ErrnoError(nodes.error(), directory));
  return std::unique_ptr<Mirror>(new Mirror(*std::move(nodes), std::move(status), top));
}

// ---- what is there ---------------------------------------------------------------

struct stat Mirror::StatusAttributes() const {
  struct stat status {};
  status.st_ino = kStatusInode;
  status.st_mode = S_IFREG | 0444;
  status.st_nlink = 1;
  status.st_uid = top_.st_uid;
  status.st_gid = top_.st_gid;
  // Its size is that of the moment when it is opened: as in /proc, none is told before.
  status.st_blksize = 4096;
  ::clock_gettime(CLOCK_REALTIME, &status.st_mtim);
  status.st_atim = status.st_ctim = status.st_mtim;
  return status;
}

Errno<MirrorEntry> Mirror::Lookup(MirrorId parent, const std::string& name) {
  if (IsStatus(parent, name)) return MirrorEntry{kMirrorStatus, StatusAttributes()};
  MIRROR_ASSIGN_OR_RETURN(const auto node, nodes_->Find(parent));
  return nodes_->Lookup(node, name);
}

// An open file is there whatever became of its name.
Errno<PlacePtr> Mirror::PlaceOf(MirrorId id, const MirrorFile* open) {
  if (open != nullptr && open->place) return open->place;
  return nodes_->PlaceOf(id);
}

Errno<struct stat> Mirror::Attributes(MirrorId id, const MirrorFile* open) {
  if (id == kMirrorStatus) return StatusAttributes();
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, PlaceOf(id, open));
  return StatOf(place->get());
}

Errno<std::string> Mirror::ReadLink(MirrorId id) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, nodes_->PlaceOf(id));
  std::string target(PATH_MAX, '\0');
  MIRROR_ASSIGN_OR_RETURN(
      const int length,
      Checked(static_cast<int>(::readlinkat(place->get(), "", target.data(), target.size()))));
  target.resize(static_cast<size_t>(length));
  return target;
}

Errno<struct statvfs> Mirror::Space(MirrorId id) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place,
                          nodes_->PlaceOf(id == kMirrorStatus ? kMirrorRoot : id));
  struct statvfs space {};
  MIRROR_RETURN_IF_ERROR(Checked(::fstatvfs(place->get(), &space)));
  return space;
}

Errno<struct stat> Mirror::Change(MirrorId id, const MirrorChange& change, const MirrorFile* open,
                                  const MirrorCaller& caller) {
  if (id == kMirrorStatus) return FailErrno(EPERM);
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, PlaceOf(id, open));
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  const int fd = place->get();
  // The owner first: changing it clears mode bits.
  if (change.owner) {
    MIRROR_RETURN_IF_ERROR(
        Checked(::fchownat(fd, "", change.uid, change.gid, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW)));
  }
  if (change.mode) {
    MIRROR_RETURN_IF_ERROR(
        Checked(::fchmodat(AT_FDCWD, PathOfPlace(fd).c_str(), change.new_mode & 07777, 0)));
  }
  if (change.size) MIRROR_RETURN_IF_ERROR(ChangeSize(*place, open, change.new_size));
  if (change.times) {
    MIRROR_RETURN_IF_ERROR(Checked(::utimensat(fd, "", change.new_times, AT_EMPTY_PATH)));
  }
  return StatOf(fd);
}

// ---- names -----------------------------------------------------------------------

template <class Act>
Errno<MirrorEntry> Mirror::Make(MirrorId parent, const std::string& name,
                                const MirrorCaller& caller, const Act& act) {
  if (IsStatus(parent, name)) return FailErrno(EEXIST);
  MIRROR_ASSIGN_OR_RETURN(const auto node, nodes_->Find(parent));
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, nodes_->PlaceOf(node));
  {
    const ActAs as(caller);
    if (as.error() != 0) return FailErrno(as.error());
    MIRROR_RETURN_IF_ERROR(Checked(act(place->get())));
  }
  return nodes_->Lookup(node, name);
}

Errno<MirrorEntry> Mirror::MakeDirectory(MirrorId parent, const std::string& name, mode_t mode,
                                         const MirrorCaller& caller) {
  return Make(parent, name, caller, [&](int at) { return ::mkdirat(at, name.c_str(), mode); });
}

Errno<MirrorEntry> Mirror::MakeNode(MirrorId parent, const std::string& name, mode_t mode,
                                    dev_t device, const MirrorCaller& caller) {
  return Make(parent, name, caller,
              [&](int at) { return ::mknodat(at, name.c_str(), mode, device); });
}

Errno<MirrorEntry> Mirror::MakeSymlink(MirrorId parent, const std::string& name,
                                       const std::string& target, const MirrorCaller& caller) {
  return Make(parent, name, caller,
              [&](int at) { return ::symlinkat(target.c_str(), at, name.c_str()); });
}

Errno<MirrorEntry> Mirror::Link(MirrorId id, MirrorId parent, const std::string& name,
                                const MirrorCaller& caller) {
  if (id == kMirrorStatus) return FailErrno(EPERM);
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, nodes_->PlaceOf(id));
  const std::string from = PathOfPlace(place->get());
  return Make(parent, name, caller, [&](int at) {
    return ::linkat(AT_FDCWD, from.c_str(), at, name.c_str(), AT_SYMLINK_FOLLOW);
  });
}

ErrnoStatus Mirror::Remove(MirrorId parent, const std::string& name, int flags,
                           const MirrorCaller& caller) {
  if (IsStatus(parent, name)) return FailErrno(EPERM);
  MIRROR_ASSIGN_OR_RETURN(const auto node, nodes_->Find(parent));
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, nodes_->PlaceOf(node));
  MirrorNodes::Held held(*nodes_, node, name);
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  MIRROR_RETURN_IF_ERROR(Checked(::unlinkat(place->get(), name.c_str(), flags)));
  held.Gone();
  return {};
}

ErrnoStatus Mirror::Unlink(MirrorId parent, const std::string& name, const MirrorCaller& caller) {
  return Remove(parent, name, 0, caller);
}

ErrnoStatus Mirror::RemoveDirectory(MirrorId parent, const std::string& name,
                                    const MirrorCaller& caller) {
  return Remove(parent, name, AT_REMOVEDIR, caller);
}

ErrnoStatus Mirror::Rename(MirrorId parent, const std::string& name, MirrorId to,
                           const std::string& new_name, unsigned flags,
                           const MirrorCaller& caller) {
  if (IsStatus(parent, name) || IsStatus(to, new_name)) return FailErrno(EPERM);
  MIRROR_ASSIGN_OR_RETURN(const auto from_node, nodes_->Find(parent));
  MIRROR_ASSIGN_OR_RETURN(const auto to_node, nodes_->Find(to));
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr from_place, nodes_->PlaceOf(from_node));
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr to_place, nodes_->PlaceOf(to_node));
  MirrorNodes::Held moved(*nodes_, from_node, name);
  MirrorNodes::Held replaced(*nodes_, to_node, new_name);
  {
    const ActAs as(caller);
    if (as.error() != 0) return FailErrno(as.error());
    MIRROR_RETURN_IF_ERROR(Checked(
        ::renameat2(from_place->get(), name.c_str(), to_place->get(), new_name.c_str(), flags)));
  }
  if (moved.Is(replaced)) return {};  // two names of one file: nothing happened
  moved.Moved(to_node, new_name);
  if ((flags & RENAME_EXCHANGE) != 0) {
    replaced.Moved(from_node, name);
  } else {
    replaced.Gone();
  }
  return {};
}

// ---- open files ------------------------------------------------------------------

std::unique_ptr<MirrorFile> Mirror::Opened(MirrorNodes::NodePtr node, Descriptor file,
                                           PlacePtr place, int flags) {
  auto opened = std::make_unique<MirrorFile>();
  opened->node = std::move(node);
  opened->file = std::move(file);
  opened->place = std::move(place);
  opened->writes = (flags & O_ACCMODE) != O_RDONLY;
  if (opened->writes) ++writers_;
  return opened;
}

void Mirror::Closed(const MirrorFile& file) {
  if (file.writes) --writers_;
  if (file.streamed && file.node) --file.node->streamed;
}

Errno<std::unique_ptr<MirrorFile>> Mirror::Open(MirrorId id, int flags,
                                                const MirrorCaller& caller) {
  if (id == kMirrorStatus) {
    if ((flags & O_ACCMODE) != O_RDONLY) return FailErrno(EACCES);
    auto status = std::make_unique<MirrorFile>();
    status->text = status_(caller);
    status->streamed = true;
    return status;
  }
  MIRROR_ASSIGN_OR_RETURN(auto node, nodes_->Find(id));
  if (!S_ISREG(node->key.type)) return FailErrno(ENXIO);
  MIRROR_ASSIGN_OR_RETURN(PlacePtr place, nodes_->PlaceOf(node));
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  MIRROR_ASSIGN_OR_RETURN(Descriptor file, OpenPlace(*place, flags & kOpenersFlags));
  return Opened(std::move(node), std::move(file), std::move(place), flags);
}

Errno<Mirror::Created> Mirror::Create(MirrorId parent, const std::string& name, mode_t mode,
                                      int flags, const MirrorCaller& caller) {
  Descriptor file;
  MIRROR_ASSIGN_OR_RETURN(MirrorEntry entry, Make(parent, name, caller, [&](int at) {
                            const int how = (flags & (kOpenersFlags | O_EXCL)) | O_CREAT |
                                            O_NOFOLLOW | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
                            file = Descriptor(::openat(at, name.c_str(), how, mode));
                            return file.get();
                          }));
  MIRROR_ASSIGN_OR_RETURN(auto node, nodes_->Find(entry.id));
  auto place = nodes_->PlaceOf(node);
  const auto made = StatOf(file.get());
  // Somebody else may have changed the name, or had a pipe there.
  const bool same = place && made && made->st_dev == entry.status.st_dev &&
                    made->st_ino == entry.status.st_ino && S_ISREG(made->st_mode);
  if (!same) {
    nodes_->Forget(entry.id, 1);
    return FailErrno(ESTALE);
  }
  return Created{entry, Opened(std::move(node), std::move(file), *std::move(place), flags)};
}

Errno<std::unique_ptr<MirrorDirectory>> Mirror::OpenDirectory(MirrorId id,
                                                              const MirrorCaller& caller) {
  auto directory = std::make_unique<MirrorDirectory>();
  MIRROR_ASSIGN_OR_RETURN(directory->node, nodes_->Find(id));
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, nodes_->PlaceOf(directory->node));
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  Descriptor file(::openat(place->get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file.valid()) return FailErrno(errno);
  directory->listing.reset(::fdopendir(file.get()));
  if (!directory->listing) return FailErrno(errno);
  file.Release();
  return directory;
}

// ---- attributes ------------------------------------------------------------------

Errno<PlacePtr> Mirror::PlaceWithAttributes(MirrorId id, const std::string& name) {
  if (id == kMirrorStatus || !IsShown(name)) return FailErrno(EOPNOTSUPP);
  MIRROR_ASSIGN_OR_RETURN(const auto node, nodes_->Find(id));
  if (S_ISLNK(node->key.type)) return FailErrno(EOPNOTSUPP);  // a link has none of these
  return nodes_->PlaceOf(node);
}

ErrnoStatus Mirror::SetAttribute(MirrorId id, const std::string& name, std::string_view value,
                                 int flags, const MirrorCaller& caller) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, PlaceWithAttributes(id, name));
  const std::string path = PathOfPlace(place->get());
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  MIRROR_RETURN_IF_ERROR(
      Checked(::setxattr(path.c_str(), name.c_str(), value.data(), value.size(), flags)));
  return {};
}

ErrnoStatus Mirror::RemoveAttribute(MirrorId id, const std::string& name,
                                    const MirrorCaller& caller) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, PlaceWithAttributes(id, name));
  const std::string path = PathOfPlace(place->get());
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  MIRROR_RETURN_IF_ERROR(Checked(::removexattr(path.c_str(), name.c_str())));
  return {};
}

Errno<std::string> Mirror::Attribute(MirrorId id, const std::string& name,
                                     const MirrorCaller& caller) {
  const auto value = ReadAttribute(id, name, caller);
  // The kernel asks before it lets anybody in, and takes all else for a failure.
  const bool none = !value && value.error() == EOPNOTSUPP && name.starts_with("system.posix_acl_");
  if (none) return FailErrno(ENODATA);
  return value;
}

Errno<std::string> Mirror::ReadAttribute(MirrorId id, const std::string& name,
                                         const MirrorCaller& caller) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr place, PlaceWithAttributes(id, name));
  const std::string path = PathOfPlace(place->get());
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  std::string value(XATTR_SIZE_MAX, '\0');
  MIRROR_ASSIGN_OR_RETURN(const int size,
                          Checked(static_cast<int>(
                              ::getxattr(path.c_str(), name.c_str(), value.data(), value.size()))));
  value.resize(static_cast<size_t>(size));
  return value;
}

Errno<std::string> Mirror::AttributeNames(MirrorId id, const MirrorCaller& caller) {
  const auto place = PlaceWithAttributes(id, "user.");
  if (!place) {
    if (place.error() == EOPNOTSUPP) return std::string();
    return FailErrno(place.error());
  }
  const std::string path = PathOfPlace((*place)->get());
  const ActAs as(caller);
  if (as.error() != 0) return FailErrno(as.error());
  std::string all(XATTR_LIST_MAX, '\0');
  MIRROR_ASSIGN_OR_RETURN(
      const int size, Checked(static_cast<int>(::listxattr(path.c_str(), all.data(), all.size()))));
  std::string shown;
  for (std::string_view rest(all.data(), static_cast<size_t>(size)); !rest.empty();) {
    const std::string_view name = rest.substr(0, rest.find('\0'));
    if (IsShown(name)) shown.append(name).push_back('\0');
    rest.remove_prefix(std::min(rest.size(), name.size() + 1));
  }
  return shown;
}

}  // namespace ckptfs
