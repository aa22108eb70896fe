// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/fuse_ops.h"

#include <linux/limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "core/base/strings.h"
#include "fs/errno_map.h"
#include "mount/fuse/fuse_features.h"
#include "mount/logging.h"

namespace ckptfs {

void RequestTarget::Serve(Filesystem& filesystem) {
  filesystem_ = &filesystem;
  state_.store(kServing);
  state_.notify_all();
}

void RequestTarget::Abandon() {
  state_.store(kAbandoned);
  state_.notify_all();
}

Filesystem* RequestTarget::WaitForFilesystem() {
  for (int state = state_.load(); state < kServing; state = state_.load()) state_.wait(state);
  return state_.load() == kServing ? filesystem_ : nullptr;
}

bool RequestTarget::WaitForInit() {
  state_.wait(kStarting);
  return state_.load() != kAbandoned;
}

void RequestTarget::InitDone(const SessionFeatures& features) {
  features_ = features;
  int expected = kStarting;
  state_.compare_exchange_strong(expected, kInitialised);
  state_.notify_all();
}

namespace {

constexpr double kForever = 1e9;  // seconds that immutable names and attributes are cached
constexpr uint32_t kBlockSize = 4096;
// The size that a buffering reader (Python's) takes at once.  Between the records of a zip file
// such a reader seeks: with a page at a time it asks twice as often, with much more it reads
// bytes that nobody wants.
constexpr uint32_t kReaderBlock = 8 << 10;
constexpr unsigned kMaxBackground = 128;
constexpr unsigned kCongestion = 96;
constexpr size_t kHugePage = 2 << 20;

RequestTarget& TargetOf(fuse_req_t request) {
  return *static_cast<RequestTarget*>(fuse_req_userdata(request));
}

Caller CallerOf(fuse_req_t request) {
  const fuse_ctx* context = fuse_req_ctx(request);
  return Caller{context->uid, context->gid, static_cast<uint32_t>(context->pid)};
}

void ReplyError(fuse_req_t request, const Error& error) { fuse_reply_err(request, ErrnoOf(error)); }

struct stat StatOf(const Attributes& attributes) {
  struct stat out {};
  out.st_ino = static_cast<ino_t>(attributes.inode);
  out.st_mode = attributes.mode;
  out.st_nlink = attributes.nlink;
  out.st_uid = attributes.uid;
  out.st_gid = attributes.gid;
  out.st_size = static_cast<off_t>(attributes.size);
  out.st_blocks = static_cast<blkcnt_t>(attributes.blocks);
  out.st_blksize = S_ISREG(attributes.mode) ? kReaderBlock : kBlockSize;
  out.st_mtim.tv_sec = attributes.mtime_ns / 1'000'000'000;
  out.st_mtim.tv_nsec = attributes.mtime_ns % 1'000'000'000;
  if (out.st_mtim.tv_nsec < 0) {  // before the epoch
    --out.st_mtim.tv_sec;
    out.st_mtim.tv_nsec += 1'000'000'000;
  }
  out.st_atim = out.st_ctim = out.st_mtim;
  return out;
}

double CacheSeconds(const Attributes& attributes) {
  return attributes.immutable ? kForever : attributes.valid_ms / 1000.0;
}

fuse_entry_param EntryOf(const Attributes& attributes) {
  fuse_entry_param entry{};
  entry.ino = static_cast<fuse_ino_t>(attributes.inode);
  entry.attr = StatOf(attributes);
  entry.attr_timeout = entry.entry_timeout = CacheSeconds(attributes);
  return entry;
}

// Runs a handler with the filesystem; what it throws (memory) becomes an errno.
template <class Handler>
void WithFilesystem(fuse_req_t request, Handler&& handler) {
  Filesystem* filesystem = TargetOf(request).WaitForFilesystem();
  if (filesystem == nullptr) {
    fuse_reply_err(request, EIO);
    return;
  }
  int failure = 0;
  try {
    handler(*filesystem);
  } catch (const std::bad_alloc&) {
    failure = ENOMEM;
  } catch (const std::exception& error) {
    Log(LogLevel::kError, StrCat("request failed: ", std::string(error.what())));
    failure = EIO;
  }
  if (failure != 0) fuse_reply_err(request, failure);
}

void Init(void* userdata, fuse_conn_info* connection) {
  connection->max_background = kMaxBackground;
  connection->congestion_threshold = kCongestion;
  connection->max_read = kMaxRequestBytes;
  connection->max_write = std::max(connection->max_write, kMaxRequestBytes);  // sets max_pages
  connection->max_readahead = UINT32_MAX;
  for (const uint32_t wanted : {FUSE_CAP_ASYNC_READ, FUSE_CAP_ASYNC_DIO, FUSE_CAP_PARALLEL_DIROPS,
                                FUSE_CAP_READDIRPLUS, FUSE_CAP_EXPLICIT_INVAL_DATA,
                                // A link that moves is another inode.
                                FUSE_CAP_CACHE_SYMLINKS}) {
    SetFeature(*connection, wanted, true);
  }
  for (const uint32_t unwanted :
       {FUSE_CAP_AUTO_INVAL_DATA, FUSE_CAP_WRITEBACK_CACHE, FUSE_CAP_SPLICE_READ,
        FUSE_CAP_SPLICE_WRITE, FUSE_CAP_SPLICE_MOVE, FUSE_CAP_READDIRPLUS_AUTO}) {
    SetFeature(*connection, unwanted, false);
  }
  RefuseInterrupts(*connection);
  SessionFeatures features;
  features.passthrough = RequestPassthrough(*connection);
  features.direct_io_mmap = RequestDirectIoMmap(*connection);
  static_cast<RequestTarget*>(userdata)->InitDone(features);
}

void Lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const auto found = filesystem.Lookup(InodeNumber{parent}, name, CallerOf(request));
    if (!found) return ReplyError(request, found.error());
    const fuse_entry_param entry = EntryOf(*found);
    // A reader that was killed never learns of the reference.
    if (fuse_reply_entry(request, &entry) != 0) filesystem.Forget(found->inode, 1);
  });
}

void Forget(fuse_req_t request, fuse_ino_t inode, uint64_t count) {
  Filesystem* filesystem = TargetOf(request).WaitForFilesystem();
  if (filesystem != nullptr) filesystem->Forget(InodeNumber{inode}, count);
  fuse_reply_none(request);
}

void ForgetMulti(fuse_req_t request, size_t count, fuse_forget_data* forgets) {
  Filesystem* filesystem = TargetOf(request).WaitForFilesystem();
  for (size_t i = 0; filesystem != nullptr && i < count; ++i) {
    filesystem->Forget(InodeNumber{forgets[i].ino}, forgets[i].nlookup);
  }
  fuse_reply_none(request);
}

void GetAttributes(fuse_req_t request, fuse_ino_t inode, fuse_file_info*) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const auto found = filesystem.GetAttributes(InodeNumber{inode}, CallerOf(request));
    if (!found) return ReplyError(request, found.error());
    const struct stat attributes = StatOf(*found);
    fuse_reply_attr(request, &attributes, CacheSeconds(*found));
  });
}

void ReadLink(fuse_req_t request, fuse_ino_t inode) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const auto target = filesystem.ReadLink(InodeNumber{inode}, CallerOf(request));
    if (!target) return ReplyError(request, target.error());
    fuse_reply_readlink(request, target->c_str());
  });
}

// The kernel's id for the file's backing, or 0 with `file` made one that is
// answered by READs.
int AcquireBacking(fuse_req_t request, Filesystem& filesystem, InodeNumber inode, OpenFile& file) {
  BackingIds& ids = TargetOf(request).backing_ids();
  if (const int id = ids.Acquire(request, inode, file); id > 0) return id;
  const int why = errno;
  auto streamed = filesystem.Degrade(file.handle);
  if (!streamed) return ids.Acquire(request, inode, file);  // an open beside it was let through
  file = *streamed;
  filesystem.DisablePassthrough(
      StrCat("no kernel passthrough: ", std::generic_category().message(why)));
  return 0;
}

void ReplyOpen(fuse_req_t request, Filesystem& filesystem, InodeNumber inode, OpenFile file,
               fuse_file_info& info) {
  const int id = file.backing_fd >= 0 ? AcquireBacking(request, filesystem, inode, file) : 0;
  info.fh = static_cast<uint64_t>(file.handle);
  info.noflush = 1;
  info.keep_cache = id == 0 && file.keep_cache;  // the kernel refuses it with passthrough
  info.direct_io = id == 0 && file.direct_io;
  if (id > 0) SetBacking(info, id);
  if (fuse_reply_open(request, &info) != 0) {  // the opener was killed
    TargetOf(request).backing_ids().Release(request, file.handle);
    filesystem.Release(file.handle);
  }
}

void Open(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const auto file = filesystem.Open(InodeNumber{inode}, info->flags, CallerOf(request));
    if (!file) return ReplyError(request, file.error());
    ReplyOpen(request, filesystem, InodeNumber{inode}, *file, *info);
  });
}

// A buffer per thread, on huge pages where the kernel gives them, kept for the
// thread's life: READs must not fault pages.
class Scratch {
 public:
  ~Scratch() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  std::span<std::byte> Get(size_t size) {
    if (size > bytes_) Grow(size);
    return {static_cast<std::byte*>(base_), size};
  }

 private:
  void Grow(size_t size) {
    const size_t rounded = (size + kHugePage - 1) / kHugePage * kHugePage;
    void* fresh =
        ::mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    ::madvise(fresh, rounded, MADV_HUGEPAGE);
    if (base_ != nullptr) ::munmap(base_, bytes_);
    base_ = fresh;
    bytes_ = rounded;
  }

  void* base_ = nullptr;
  size_t bytes_ = 0;
};

// Answers with bytes that lie in memory: the kernel copies them from there.
void ReplyLent(fuse_req_t request, Filesystem& filesystem, FileHandle handle,
               const LentBytes& lent) {
  std::vector<iovec> parts;
  for (const std::span<const std::byte> span : lent.spans) {
    parts.push_back({const_cast<std::byte*>(span.data()), span.size()});
  }
  const int sent = fuse_reply_iov(request, parts.data(), static_cast<int>(parts.size()));
  if (sent != -EFAULT) return;
  try {
    filesystem.LentInVain(handle);  // the reader has got EIO
  } catch (const std::bad_alloc&) {
    return;  // the request is answered: nothing may be said of it to the kernel again
  }
}

void Read(fuse_req_t request, fuse_ino_t, size_t size, off_t offset, fuse_file_info* info) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const FileHandle handle{info->fh};
    if (const auto lent = filesystem.Lend(handle, static_cast<uint64_t>(offset), size)) {
      return ReplyLent(request, filesystem, handle, *lent);
    }
    thread_local Scratch scratch;
    const std::span<std::byte> buffer = scratch.Get(std::max<size_t>(size, 1)).first(size);
    const auto got = filesystem.Read(handle, static_cast<uint64_t>(offset), buffer);
    if (!got) return ReplyError(request, got.error());
    fuse_reply_buf(request, reinterpret_cast<const char*>(buffer.data()), *got);
  });
}

void Release(fuse_req_t request, fuse_ino_t, fuse_file_info* info) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    TargetOf(request).backing_ids().Release(request, FileHandle{info->fh});
    filesystem.Release(FileHandle{info->fh});
    fuse_reply_err(request, 0);
  });
}

void OpenDirectory(fuse_req_t request, fuse_ino_t inode, fuse_file_info* info) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    // The kernel walks the path again then; of a listing it would not.
    if (const Status known = filesystem.CheckKnown(InodeNumber{inode}); !known) {
      return ReplyError(request, known.error());
    }
    info->fh = 0;
    fuse_reply_open(request, info);
  });
}

void ReadDirectory(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset,
                   fuse_file_info*) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const size_t limit = size / fuse_add_direntry(request, nullptr, 0, "n", nullptr, 0) + 1;
    const auto entries = filesystem.ReadDirectory(InodeNumber{inode}, static_cast<uint64_t>(offset),
                                                  limit, CallerOf(request));
    if (!entries) return ReplyError(request, entries.error());
    std::vector<char> buffer(size);
    size_t used = 0;
    for (const DirectoryEntry& entry : *entries) {
      const struct stat attributes = StatOf(entry.attributes);
      const size_t length =
          fuse_add_direntry(request, buffer.data() + used, size - used, entry.name.c_str(),
                            &attributes, static_cast<off_t>(entry.next_offset));
      if (length > size - used) break;
      used += length;
    }
    fuse_reply_buf(request, buffer.data(), used);
  });
}

// In a directory whose entries are numbered only this many are looked up ahead:
// each reference keeps a name here for as long as the kernel likes.  Offsets of
// other directories are far above.
constexpr off_t kLookedUpAhead = 4096;
constexpr off_t kMostNumbered = off_t{1} << 32;

// The entry of a listing with a reference counted, or one that names only.
fuse_entry_param CountedEntry(Filesystem& filesystem, const DirectoryEntry& entry) {
  if (entry.node) return EntryOf(filesystem.Remember(entry));
  fuse_entry_param out{};
  out.attr = StatOf(entry.attributes);
  return out;
}

void ReadDirectoryPlus(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset,
                       fuse_file_info*) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const size_t limit = size / fuse_add_direntry_plus(request, nullptr, 0, "n", nullptr, 0) + 1;
    const auto entries = filesystem.ReadDirectory(InodeNumber{inode}, static_cast<uint64_t>(offset),
                                                  limit, CallerOf(request));
    if (!entries) return ReplyError(request, entries.error());
    std::vector<char> buffer(size);
    std::vector<InodeNumber> counted;
    const bool ahead = offset < kLookedUpAhead || offset > kMostNumbered;
    size_t used = 0;
    for (const DirectoryEntry& entry : *entries) {
      const size_t length =
          fuse_add_direntry_plus(request, nullptr, 0, entry.name.c_str(), nullptr, 0);
      if (length > size - used) break;
      fuse_entry_param plus{};
      if (ahead) {
        plus = CountedEntry(filesystem, entry);
      } else {
        plus.attr = StatOf(entry.attributes);
      }
      fuse_add_direntry_plus(request, buffer.data() + used, size - used, entry.name.c_str(), &plus,
                             static_cast<off_t>(entry.next_offset));
      if (plus.ino != 0) counted.push_back(InodeNumber{plus.ino});
      used += length;
    }
    if (fuse_reply_buf(request, buffer.data(), used) == 0) return;
    for (const InodeNumber reference : counted) filesystem.Forget(reference, 1);
  });
}

// Answers with a value, or its size where that is asked for (0 bytes of room).
void ReplyAttribute(fuse_req_t request, std::string_view value, size_t room) {
  if (room == 0) {
    fuse_reply_xattr(request, value.size());
  } else if (value.size() > room) {
    fuse_reply_err(request, ERANGE);
  } else {
    fuse_reply_buf(request, value.data(), value.size());
  }
}

void GetAttribute(fuse_req_t request, fuse_ino_t inode, const char* name, size_t size) {
  // The kernel asks for capabilities and ACLs: that must not cost a look at a node.
  if (name != Filesystem::kReasonAttribute) {
    fuse_reply_err(request, std::string_view(name).starts_with("user.") ? ENODATA : EOPNOTSUPP);
    return;
  }
  WithFilesystem(request, [&](Filesystem& filesystem) {
    const auto value = filesystem.Attribute(InodeNumber{inode}, name, CallerOf(request));
    if (!value) return void(fuse_reply_err(request, ENODATA));
    // The kernel takes no more.
    ReplyAttribute(request, std::string_view(*value).substr(0, XATTR_SIZE_MAX), size);
  });
}

void ListAttributes(fuse_req_t request, fuse_ino_t inode, size_t size) {
  WithFilesystem(request, [&](Filesystem& filesystem) {
    std::string names;
    for (const std::string& name :
         filesystem.AttributeNames(InodeNumber{inode}, CallerOf(request))) {
      names.append(name).push_back('\0');
    }
    ReplyAttribute(request, names, size);
  });
}

// A read-only filesystem of no size of its own: nothing is stored in it.
void StatFilesystem(fuse_req_t request, fuse_ino_t) {
  struct statvfs out {};
  out.f_bsize = kBlockSize;
  out.f_frsize = kBlockSize;
  out.f_namemax = 255;
  fuse_reply_statfs(request, &out);
}

fuse_lowlevel_ops MakeOperations() {
  fuse_lowlevel_ops operations{};
  operations.init = Init;
  operations.lookup = Lookup;
  operations.forget = Forget;
  operations.forget_multi = ForgetMulti;
  operations.getattr = GetAttributes;
  operations.readlink = ReadLink;
  operations.open = Open;
  operations.read = Read;
  operations.release = Release;
  operations.opendir = OpenDirectory;
  operations.getxattr = GetAttribute;
  operations.listxattr = ListAttributes;
  operations.readdir = ReadDirectory;
  operations.readdirplus = ReadDirectoryPlus;
  operations.statfs = StatFilesystem;
  return operations;
}

}  // namespace

SessionHandlers ViewHandlers(RequestTarget& target) {
  static const fuse_lowlevel_ops operations = MakeOperations();
  return {&operations, &target, [&target] { target.Abandon(); }};
}

}  // namespace ckptfs
