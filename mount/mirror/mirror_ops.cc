// SPDX-License-Identifier: Apache-2.0

#include "mount/mirror/mirror_ops.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "mount/fuse/fuse_features.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

// Others may change the directory itself; the kernel asks again after this long, in seconds.
constexpr double kRemembered = 1;
constexpr unsigned kMaxBackground = 128;
constexpr unsigned kCongestion = 96;
constexpr int kMostGroups = 1024;
constexpr auto kMaySplice = static_cast<fuse_buf_copy_flags>(0);

MirrorTarget& TargetOf(fuse_req_t request) {
  return *static_cast<MirrorTarget*>(fuse_req_userdata(request));
}

// `groups`: the operation asks the disk for rights, so that they matter.
MirrorCaller CallerOf(fuse_req_t request, bool groups = true) {
  const fuse_ctx* context = fuse_req_ctx(request);
  MirrorCaller caller{context->uid, context->gid, context->umask, {}};
  if (!groups || caller.uid == 0 || ::geteuid() != 0) return caller;
  caller.groups.resize(kMostGroups);
  // One that cannot be asked (it has ended) has none.
  const int count = fuse_req_getgroups(request, kMostGroups, caller.groups.data());
  caller.groups.resize(static_cast<size_t>(std::clamp(count, 0, kMostGroups)));
  return caller;
}

MirrorFile* FileOf(const fuse_file_info* info) {
  return info == nullptr ? nullptr : reinterpret_cast<MirrorFile*>(info->fh);
}

MirrorDirectory& DirectoryOf(const fuse_file_info* info) {
  return *reinterpret_cast<MirrorDirectory*>(info->fh);
}

fuse_entry_param EntryOf(const MirrorEntry& found) {
  fuse_entry_param entry{};
  entry.ino = found.id;
  entry.attr = found.status;
  const bool own = found.id == kMirrorStatus;
  entry.attr_timeout = entry.entry_timeout = own ? 0 : kRemembered;
  return entry;
}

// Runs a handler, which has replied once it returns 0; else with that errno.
template <class Handler>
void Answer(fuse_req_t request, Handler&& handler) {
  int failure = 0;
  try {
    failure = handler(TargetOf(request).mirror());
  } catch (const std::bad_alloc&) {
    failure = ENOMEM;
  } catch (const std::exception& error) {
    Log(LogLevel::kError, StrCat("request failed: ", std::string(error.what())));
    failure = EIO;
  }
  if (failure != 0) fuse_reply_err(request, failure);
}

int ErrorOf(const ErrnoStatus& status) { return status ? 0 : status.error(); }

int ReplyStatus(fuse_req_t request, const ErrnoStatus& status) {
  if (status) fuse_reply_err(request, 0);
  return ErrorOf(status);
}

int ReplyEntry(fuse_req_t request, Mirror& mirror, const Errno<MirrorEntry>& found) {
  if (!found) return found.error();
  const fuse_entry_param entry = EntryOf(*found);
  // A caller that was killed never learns of the reference.
  if (fuse_reply_entry(request, &entry) != 0) mirror.Forget(found->id, 1);
  return 0;
}

int ReplyAttributes(fuse_req_t request, fuse_ino_t inode, const Errno<struct stat>& status) {
  if (!status) return status.error();
  fuse_reply_attr(request, &*status, inode == kMirrorStatus ? 0 : kRemembered);
  return 0;
}

// ---- names -----------------------------------------------------------------------

void Init(void* userdata, fuse_conn_info* connection) {
  connection->max_background = kMaxBackground;
  connection->congestion_threshold = kCongestion;
  connection->max_read = kMaxRequestBytes;
  connection->max_write = std::max(connection->max_write, kMaxRequestBytes);  // sets max_pages
  for (const uint32_t wanted :
       {FUSE_CAP_ASYNC_READ, FUSE_CAP_ASYNC_DIO, FUSE_CAP_PARALLEL_DIROPS, FUSE_CAP_READDIRPLUS,
        FUSE_CAP_READDIRPLUS_AUTO, FUSE_CAP_ATOMIC_O_TRUNC, FUSE_CAP_AUTO_INVAL_DATA,
        FUSE_CAP_POSIX_ACL, FUSE_CAP_DONT_MASK, FUSE_CAP_SPLICE_READ, FUSE_CAP_SPLICE_WRITE}) {
    SetFeature(*connection, wanted, true);
  }
  RequestKillPrivileges(*connection);
  // It would take passthrough away, and a writer's errors with it.
  SetFeature(*connection, FUSE_CAP_WRITEBACK_CACHE, false);
  RefuseInterrupts(*connection);
  const bool passthrough = RequestPassthrough(*connection);
  const bool direct_io_mmap = RequestDirectIoMmap(*connection);
  static_cast<MirrorTarget*>(userdata)->InitDone(passthrough, direct_io_mmap);
}

void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Answer(request,
         [&](Mirror& mirror) { return ReplyEntry(request, mirror, mirror.Lookup(parent, name)); });
}

void Forget(fuse_req_t request, fuse_ino_t inode, uint64_t count) {
  TargetOf(request).mirror().Forget(inode, count);
  fuse_reply_none(request);
}

void ForgetMulti(fuse_req_t request, size_t count, fuse_forget_data* forgets) {
  Mirror& mirror = TargetOf(request).mirror();
  for (size_t i = 0; i < count; ++i) mirror.Forget(forgets[i].ino, forgets[i].nlookup);
  fuse_reply_none(request);
}

void GetAttributes(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyAttributes(request, inode, mirror.Attributes(inode, FileOf(info)));
  });
}

timespec TimeOf(int to_set, int now, int given, const timespec& value) {
  if ((to_set & now) != 0) return {0, UTIME_NOW};
  if ((to_set & given) != 0) return value;
  return {0, UTIME_OMIT};
}

void SetAttributes(fuse_req_t request, fuse_ino_t inode, struct stat* attributes, int to_set,
                   fuse_file_info* info) {
  Answer(request, [&](Mirror& mirror) {
    MirrorChange change;
    change.mode = (to_set & FUSE_SET_ATTR_MODE) != 0;
    change.new_mode = attributes->st_mode;
    change.owner = (to_set & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)) != 0;
    if ((to_set & FUSE_SET_ATTR_UID) != 0) change.uid = attributes->st_uid;
    if ((to_set & FUSE_SET_ATTR_GID) != 0) change.gid = attributes->st_gid;
    change.size = (to_set & FUSE_SET_ATTR_SIZE) != 0;
    change.new_size = attributes->st_size;
    constexpr int kTimes = FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME | FUSE_SET_ATTR_ATIME_NOW |
                           FUSE_SET_ATTR_MTIME_NOW;
    change.times = (to_set & kTimes) != 0;
    change.new_times[0] =
        TimeOf(to_set, FUSE_SET_ATTR_ATIME_NOW, FUSE_SET_ATTR_ATIME, attributes->st_atim);
    change.new_times[1] =
        TimeOf(to_set, FUSE_SET_ATTR_MTIME_NOW, FUSE_SET_ATTR_MTIME, attributes->st_mtim);
    return ReplyAttributes(request, inode,
                           mirror.Change(inode, change, FileOf(info), CallerOf(request)));
  });
}

void ReadLink(fuse_req_t request, fuse_ino_t inode) {
  Answer(request, [&](Mirror& mirror) {
    const auto target = mirror.ReadLink(inode);
    if (!target) return target.error();
    fuse_reply_readlink(request, target->c_str());
    return 0;
  });
}

void MakeNode(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode, dev_t device) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyEntry(request, mirror,
                      mirror.MakeNode(parent, name, mode, device, CallerOf(request)));
  });
}

void MakeDirectory(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyEntry(request, mirror, mirror.MakeDirectory(parent, name, mode, CallerOf(request)));
  });
}

void MakeSymlink(fuse_req_t request, const char* target, fuse_ino_t parent, const char* name) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyEntry(request, mirror, mirror.MakeSymlink(parent, name, target, CallerOf(request)));
  });
}

void Link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t parent, const char* name) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyEntry(request, mirror, mirror.Link(inode, parent, name, CallerOf(request)));
  });
}

void Unlink(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyStatus(request, mirror.Unlink(parent, name, CallerOf(request)));
  });
}

void RemoveDirectory(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyStatus(request, mirror.RemoveDirectory(parent, name, CallerOf(request)));
  });
}

void Rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t to,
            const char* new_name, unsigned flags) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyStatus(request,
                       mirror.Rename(parent, name, to, new_name, flags, CallerOf(request)));
  });
}

void StatFilesystem(fuse_req_t request, fuse_ino_t inode) {
  Answer(request, [&](Mirror& mirror) {
    const auto space = mirror.Space(inode);
    if (!space) return space.error();
    fuse_reply_statfs(request, &*space);
    return 0;
  });
}

// ---- open files ------------------------------------------------------------------

// The kernel's id for the file, or 0 if its reads and writes are to come here.
int AcquireBacking(fuse_req_t request, MirrorFile& file) {
  MirrorTarget& target = TargetOf(request);
  if (!target.passthrough() || !file.node || file.node->streamed != 0) return 0;
  OpenFile backing;
  backing.handle = FileHandle{reinterpret_cast<uint64_t>(&file)};
  backing.backing_fd = file.place->get();
  // The kernel keeps the rights of this thread for all that passes through: those of who opened
  // the file first.
  const ActAs as(CallerOf(request, false));
  if (as.error() != 0) return 0;
  const WithoutSetIdRight without;
  const int id = target.backing_ids().Acquire(request, InodeNumber{file.node->id}, backing);
  if (id > 0) return id;
  if (target.refused++ == 0) {
    Log(LogLevel::kWarning,
        StrCat("a file is written through this process: no kernel passthrough: ",
               std::generic_category().message(errno)));
  }
  return 0;
}

// Fills in how the kernel is to use an open file.
void Describe(fuse_req_t request, MirrorFile& file, fuse_file_info& info) {
  info.fh = reinterpret_cast<uint64_t>(&file);
  info.noflush = !file.writes;
  if (const int id = AcquireBacking(request, file); id > 0) return SetBacking(info, id);
  if (file.node) ++file.node->streamed;
  file.streamed = true;
  // Nothing is kept twice, and a write is answered by the disk.  Files that are mapped need the
  // page cache where the kernel cannot map others.
  info.direct_io = !file.node || TargetOf(request).direct_io_mmap();
}

void Close(fuse_req_t request, std::unique_ptr<MirrorFile> file) {
  MirrorTarget& target = TargetOf(request);
  target.backing_ids().Release(request, FileHandle{reinterpret_cast<uint64_t>(file.get())});
  target.mirror().Closed(*file);
}

void Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  Answer(request, [&](Mirror& mirror) {
    auto file = mirror.Open(inode, info->flags, CallerOf(request));
    if (!file) return file.error();
    Describe(request, **file, *info);
    MirrorFile* const opened = file->release();
    // The opener was killed.
    if (fuse_reply_open(request, info) != 0) Close(request, std::unique_ptr<MirrorFile>(opened));
    return 0;
  });
}

void Create(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode,
            fuse_file_info* info) {
  Answer(request, [&](Mirror& mirror) {
    auto made = mirror.Create(parent, name, mode, info->flags, CallerOf(request));
    if (!made) return made.error();
    Describe(request, *made->file, *info);
    const fuse_entry_param entry = EntryOf(made->entry);
    MirrorFile* const opened = made->file.release();
    if (fuse_reply_create(request, &entry, info) != 0) {
      Close(request, std::unique_ptr<MirrorFile>(opened));
      mirror.Forget(made->entry.id, 1);
    }
    return 0;
  });
}

void Read(fuse_req_t request, fuse_ino_t, size_t size, off_t offset, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const MirrorFile& file = *FileOf(info);
    ++TargetOf(request).reads;
    if (!file.node) {
      const auto begin = std::min(static_cast<size_t>(offset), file.text.size());
      fuse_reply_buf(request, file.text.data() + begin, std::min(size, file.text.size() - begin));
      return 0;
    }
    ++TargetOf(request).reads;
    fuse_bufvec bytes = FUSE_BUFVEC_INIT(size);
    bytes.buf[0].flags = static_cast<fuse_buf_flags>(FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK);
    bytes.buf[0].fd = file.file.get();
    bytes.buf[0].pos = offset;
    fuse_reply_data(request, &bytes, kMaySplice);
    return 0;
  });
}

void Write(fuse_req_t request, fuse_ino_t, fuse_bufvec* bytes, off_t offset, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const MirrorFile& file = *FileOf(info);
    ++TargetOf(request).writes;
    fuse_bufvec out = FUSE_BUFVEC_INIT(fuse_buf_size(bytes));
    out.buf[0].flags = static_cast<fuse_buf_flags>(FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK);
    out.buf[0].fd = file.file.get();
    out.buf[0].pos = offset;
    // As the writer: the disk clears set-user-ID bits, and keeps what it reserves.
    const ActAs as(CallerOf(request, false));
    if (as.error() != 0) return as.error();
    const ssize_t written = fuse_buf_copy(&out, bytes, kMaySplice);
    if (written < 0) return static_cast<int>(-written);
    fuse_reply_write(request, static_cast<size_t>(written));
    return 0;
  });
}

// Answers with what a call on an open file says.
int ReplyCall(fuse_req_t request, int result) {
  if (result != 0) return errno;
  fuse_reply_err(request, 0);
  return 0;
}

// Network filesystems tell at a close what became of writes.
void Flush(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const int copy = ::fcntl(FileOf(info)->file.get(), F_DUPFD_CLOEXEC, 0);
    return copy < 0 ? errno : ReplyCall(request, ::close(copy));
  });
}

void Sync(fuse_req_t request, fuse_ino_t, int data_only, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const int fd = FileOf(info)->file.get();
    if (fd < 0) return EINVAL;
    return ReplyCall(request, data_only != 0 ? ::fdatasync(fd) : ::fsync(fd));
  });
}

void Allocate(fuse_req_t request, fuse_ino_t, int mode, off_t offset, off_t length,
              fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const ActAs as(CallerOf(request, false));
    if (as.error() != 0) return as.error();
    return ReplyCall(request, ::fallocate(FileOf(info)->file.get(), mode, offset, length));
  });
}

void Seek(fuse_req_t request, fuse_ino_t, off_t offset, int whence, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const off_t found = ::lseek(FileOf(info)->file.get(), offset, whence);
    if (found < 0) return errno;
    fuse_reply_lseek(request, found);
    return 0;
  });
}

void CopyRange(fuse_req_t request, fuse_ino_t, off_t from, fuse_file_info* in, fuse_ino_t, off_t to,
               fuse_file_info* out, size_t length, int flags) {
  Answer(request, [&](Mirror&) {
    const ActAs as(CallerOf(request, false));
    if (as.error() != 0) return as.error();
    const ssize_t copied = ::copy_file_range(FileOf(in)->file.get(), &from, FileOf(out)->file.get(),
                                             &to, length, static_cast<unsigned>(flags));
    if (copied < 0) return errno;
    fuse_reply_write(request, static_cast<size_t>(copied));
    return 0;
  });
}

void Release(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
  Close(request, std::unique_ptr<MirrorFile>(FileOf(info)));
  fuse_reply_err(request, 0);
}

// ---- directories -----------------------------------------------------------------

void OpenDirectory(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  Answer(request, [&](Mirror& mirror) {
    auto directory = mirror.OpenDirectory(inode, CallerOf(request));
    if (!directory) return directory.error();
    MirrorDirectory* const opened = directory->release();
    info->fh = reinterpret_cast<uint64_t>(opened);
    if (fuse_reply_open(request, info) != 0) delete opened;
    return 0;
  });
}

// An entry of a listing, with a reference counted if `plus` and it can be looked up.
size_t AddEntry(fuse_req_t request, Mirror& mirror, const MirrorDirectory& directory, bool plus,
                const dirent& entry, char* out, size_t room) {
  fuse_entry_param param{};
  param.attr.st_ino = entry.d_ino;
  param.attr.st_mode = DTTOIF(entry.d_type);
  if (!plus) {
    return fuse_add_direntry(request, out, room, entry.d_name, &param.attr, entry.d_off);
  }
  const size_t needed = fuse_add_direntry_plus(request, nullptr, 0, entry.d_name, nullptr, 0);
  if (needed > room) return needed;
  const std::string name = entry.d_name;
  if (name != "." && name != "..") {
    // One that went meanwhile is named without attributes.
    if (const auto found = mirror.Lookup(directory.node->id, name)) param = EntryOf(*found);
  }
  return fuse_add_direntry_plus(request, out, room, entry.d_name, &param, entry.d_off);
}

void List(fuse_req_t request, size_t size, off_t offset, fuse_file_info* info, bool plus) {
  Answer(request, [&](Mirror& mirror) {
    MirrorDirectory& directory = DirectoryOf(info);
    if (offset != directory.position) ::seekdir(directory.listing.get(), offset);
    std::vector<char> buffer(size);
    size_t used = 0;
    directory.position = offset;
    while (true) {
      errno = 0;
      const dirent* const entry = ::readdir(directory.listing.get());
      if (entry == nullptr && errno != 0 && used == 0) return errno;
      if (entry == nullptr) break;
      // A file of this name in the directory itself is hidden.
      const bool hidden = directory.node->id == kMirrorRoot && Mirror::kStatusName == entry->d_name;
      if (!hidden) {
        const size_t length =
            AddEntry(request, mirror, directory, plus, *entry, buffer.data() + used, size - used);
        if (length > size - used) {
          ::seekdir(directory.listing.get(), directory.position);
          break;
        }
        used += length;
      }
      directory.position = entry->d_off;
    }
    fuse_reply_buf(request, buffer.data(), used);
    return 0;
  });
}

void ReadDirectory(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                   fuse_file_info* info) {
  List(request, size, offset, info, false);
}

void ReadDirectoryPlus(fuse_req_t request, fuse_ino_t, size_t size, off_t offset,
                       fuse_file_info* info) {
  List(request, size, offset, info, true);
}

void ReleaseDirectory(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
  delete &DirectoryOf(info);
  fuse_reply_err(request, 0);
}

void SyncDirectory(fuse_req_t request, fuse_ino_t, int data_only, fuse_file_info* info) {
  Answer(request, [&](Mirror&) {
    const int fd = ::dirfd(DirectoryOf(info).listing.get());
    return ReplyCall(request, data_only != 0 ? ::fdatasync(fd) : ::fsync(fd));
  });
}

// ---- attributes ------------------------------------------------------------------

// Answers with a value, or its size where that is asked for (0 bytes of room).
int ReplyValue(fuse_req_t request, const Errno<std::string>& value, size_t room) {
  if (!value) return value.error();
  if (room == 0) {
    fuse_reply_xattr(request, value->size());
  } else if (value->size() > room) {
    return ERANGE;
  } else {
    fuse_reply_buf(request, value->data(), value->size());
  }
  return 0;
}

void GetAttribute(fuse_req_t request, fuse_ino_t inode, const char* name, size_t size) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyValue(request, mirror.Attribute(inode, name, CallerOf(request)), size);
  });
}

void ListAttributes(fuse_req_t request, fuse_ino_t inode, size_t size) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyValue(request, mirror.AttributeNames(inode, CallerOf(request)), size);
  });
}

void SetAttribute(fuse_req_t request, fuse_ino_t inode, const char* name, const char* value,
                  size_t size, int flags) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyStatus(request,
                       mirror.SetAttribute(inode, name, {value, size}, flags, CallerOf(request)));
  });
}

void RemoveAttribute(fuse_req_t request, fuse_ino_t inode, const char* name) {
  Answer(request, [&](Mirror& mirror) {
    return ReplyStatus(request, mirror.RemoveAttribute(inode, name, CallerOf(request)));
  });
}

fuse_lowlevel_ops MakeOperations() {
  fuse_lowlevel_ops operations{};
  operations.init = Init;
  operations.lookup = Lookup;
  operations.forget = Forget;
  operations.forget_multi = ForgetMulti;
  operations.getattr = GetAttributes;
  operations.setattr = SetAttributes;
  operations.readlink = ReadLink;
  operations.mknod = MakeNode;
  operations.mkdir = MakeDirectory;
  operations.symlink = MakeSymlink;
  operations.link = Link;
  operations.unlink = Unlink;
  operations.rmdir = RemoveDirectory;
  operations.rename = Rename;
  operations.statfs = StatFilesystem;
  operations.open = Open;
  operations.create = Create;
  operations.read = Read;
  operations.write_buf = Write;
  operations.flush = Flush;
  operations.fsync = Sync;
  operations.fallocate = Allocate;
  operations.lseek = Seek;
  operations.copy_file_range = CopyRange;
  operations.release = Release;
  operations.opendir = OpenDirectory;
  operations.readdir = ReadDirectory;
  operations.readdirplus = ReadDirectoryPlus;
  operations.releasedir = ReleaseDirectory;
  operations.fsyncdir = SyncDirectory;
  operations.getxattr = GetAttribute;
  operations.listxattr = ListAttributes;
  operations.setxattr = SetAttribute;
  operations.removexattr = RemoveAttribute;
  return operations;
}

}  // namespace

SessionHandlers MirrorHandlers(MirrorTarget& target) {
  static const fuse_lowlevel_ops operations = MakeOperations();
  return {&operations, &target, {}};
}

}  // namespace ckptfs
