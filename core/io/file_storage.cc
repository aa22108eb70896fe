// SPDX-License-Identifier: Apache-2.0

#include "core/io/file_storage.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/base/descriptor.h"
#include "core/base/file_lock.h"
#include "core/base/strings.h"
#include "core/base/trust.h"
#include "core/io/file_root.h"
#include "core/io/file_stamp.h"
#include "core/io/local_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTemporary = ".tmp";
constexpr int kMaxRaces = 100;

Error SystemError(std::string_view call, const std::string& path) {
  return ErrnoError(errno, StrCat(call, " ", path));
}

// Refuses files that somebody else wrote or may write: a manifest says which files are
// shown to whom.
Status CheckTrusted(int fd, const std::string& path) {
  struct stat status;
  if (fstat(fd, &status) != 0) return Fail(SystemError("stat", path));
  const std::string why = WhyNotTrusted(status, Believed::kOwnUserOrRoot);
  if (why.empty()) return {};
  return Fail(ErrorCode::kPermission,
              StrCat(path, " ", why, ": not trusted as part of a store of user ", geteuid()));
}

// Opens an object without following a link; every directory on the way, and what
// is opened, has to be trusted.
Result<Descriptor> OpenTrusted(const std::string& directory, std::string_view name, int flags) {
  std::string path = directory;
  CKPT_ASSIGN_OR_RETURN(Descriptor at, OpenDescriptor(path, O_PATH | O_DIRECTORY));
  CKPT_RETURN_IF_ERROR(CheckTrusted(at.get(), path));
  while (!name.empty()) {
    const size_t slash = name.find('/');
    const std::string part(name.substr(0, slash));
    const bool last = slash == std::string_view::npos;
    name = last ? std::string_view() : name.substr(slash + 1);
    path += StrCat("/", part);
    const int how = last ? flags | O_NONBLOCK : O_PATH | O_DIRECTORY;
    Descriptor next(openat(at.get(), part.c_str(), how | O_NOFOLLOW | O_CLOEXEC));
    if (next.get() < 0) return Fail(SystemError("open", path));
    CKPT_RETURN_IF_ERROR(CheckTrusted(next.get(), path));
    at = std::move(next);
  }
  return at;
}

std::string ParentOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

// Creates the missing directories of `path` and syncs the parents of those.
Status MakeDirectories(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) return {};
    return Fail(ErrorCode::kInvalid, StrCat(path, " is not a directory"));
  }
  const std::string parent = ParentOf(path);
  if (!parent.empty()) CKPT_RETURN_IF_ERROR(MakeDirectories(parent));
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return Fail(SystemError("mkdir", path));
  return SyncPath(parent.empty() ? "/" : parent);
}

// Gives the file `temporary` the name `path` unless that is taken.
Status LinkIfAbsent(const std::string& temporary, const std::string& path) {
  if (link(temporary.c_str(), path.c_str()) == 0) {
    unlink(temporary.c_str());
    return {};
  }
  if (errno == EEXIST) {
    // Over NFS a repeated request can report that its first copy succeeded.
    struct stat mine, there;
    const bool ours = stat(temporary.c_str(), &mine) == 0 && stat(path.c_str(), &there) == 0 &&
                      mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
    if (!ours) return Fail(ErrorCode::kExists, StrCat(path, " exists"));
    unlink(temporary.c_str());
    return {};
  }
  // A filesystem without hard links.
  if (renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_NOREPLACE) == 0) {
    return {};
  }
  return Fail(SystemError("rename", path));
}

bool IsNotFound(const Status& status) {
  return !status && status.error().code == ErrorCode::kNotFound;
}

// Alignment of memory and file offset for writes past the page cache, and the least
// number of bytes for which they are worth it.
constexpr uint64_t kDirectAlignment = 4096;
constexpr uint64_t kDirectBytes = uint64_t{1} << 20;

// How many of the bytes can be written past the page cache.
uint64_t DirectPart(uint64_t offset, std::span<const std::byte> bytes) {
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (bytes.size() < kDirectBytes || (address | offset) % kDirectAlignment != 0) return 0;
  return bytes.size() / kDirectAlignment * kDirectAlignment;
}

// A file of its own under .tmp, until it gets its name.
class TemporaryFile final : public StorageWriter {
 public:
  TemporaryFile(std::string temporary, std::string path, Descriptor descriptor)
      : temporary_(std::move(temporary)),
        path_(std::move(path)),
        descriptor_(std::move(descriptor)),
        direct_(open(temporary_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC)) {}
  ~TemporaryFile() override {
    if (!named_) unlink(temporary_.c_str());
  }

  Status Reserve(uint64_t bytes) override {
    while (bytes != 0 && fallocate(descriptor_.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
      if (errno == EOPNOTSUPP) return {};  // not every filesystem can
      if (errno != EINTR) return Fail(SystemError("reserve", path_));
    }
    return {};
  }
  Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
    if (const uint64_t part = DirectPart(offset, bytes); part != 0 && direct_.valid()) {
      // Where that fails the page cache's way does as well, or says why.
      if (WriteAll(direct_.get(), offset, bytes.first(part), path_)) {
        offset += part;
        bytes = bytes.subspan(part);
      }
    }
    return WriteAll(descriptor_.get(), offset, bytes, path_);
  }
  Status Close() override {
    CKPT_RETURN_IF_ERROR(Prepare());
    for (int race = 0; rename(temporary_.c_str(), path_.c_str()) != 0; ++race) {
      if (errno != ENOENT || race == kMaxRaces) return Fail(SystemError("rename", path_));
      CKPT_RETURN_IF_ERROR(MakeDirectories(ParentOf(path_)));  // it was empty, and removed
    }
    named_ = true;
    return SyncPath(ParentOf(path_));
  }
  Status CloseIfAbsent() {
    CKPT_RETURN_IF_ERROR(Prepare());
    Status linked = LinkIfAbsent(temporary_, path_);
    for (int race = 0; race < kMaxRaces && IsNotFound(linked); ++race) {  // Discard took it away
      CKPT_RETURN_IF_ERROR(MakeDirectories(ParentOf(path_)));
      linked = LinkIfAbsent(temporary_, path_);
    }
    CKPT_RETURN_IF_ERROR(linked);
    named_ = true;
    return SyncPath(ParentOf(path_));
  }

 private:
  Status Prepare() {
    if (fsync(descriptor_.get()) != 0) return Fail(SystemError("fsync", path_));
    lock_ = Descriptor(fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));  // until it has its name
    if (!lock_.valid()) return Fail(SystemError("dup", path_));
    CKPT_RETURN_IF_ERROR(descriptor_.Close(path_));
    return MakeDirectories(ParentOf(path_));
  }

  std::string temporary_;
  std::string path_;
  Descriptor descriptor_;
  const Descriptor direct_;  // none where the filesystem has no such writes
  Descriptor lock_;
  bool named_ = false;
};

// Marks a file as one that somebody writes.  False if it was taken for a leftover before
// that.  Where there are no locks nothing is.
Result<bool> Hold(int fd, const std::string& path) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  struct stat status;
  if (fstat(fd, &status) != 0) return Fail(SystemError("stat", path));
  return status.st_nlink != 0;
}

Result<std::unique_ptr<TemporaryFile>> MakeTemporary(const std::string& directory,
                                                     std::string path) {
  static std::atomic<uint64_t> counter{0};
  // Unique over the nodes that share the directory as far as O_EXCL needs it.
  for (int race = 0; race < kMaxRaces; ++race) {
    const std::string temporary =
        StrCat(directory, "/", kTemporary, "/", getpid(), "-", NowNs(), "-", counter.fetch_add(1));
    CKPT_ASSIGN_OR_RETURN(Descriptor descriptor,
                          OpenDescriptor(temporary, O_WRONLY | O_CREAT | O_EXCL, 0600));
    const auto held = Hold(descriptor.get(), temporary);
    if (held && !*held) continue;
    auto file = std::make_unique<TemporaryFile>(temporary, path, std::move(descriptor));
    if (!held) return Fail(held.error());
    return file;
  }
  return Fail(ErrorCode::kExhausted, StrCat(path, ": another process keeps removing its parts"));
}

// A plain path that is not that of the temporary files.
Status CheckObjectPath(std::string_view path) {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  if (path == kTemporary || path.starts_with(StrCat(kTemporary, "/"))) {
    return Fail(ErrorCode::kInvalid, StrCat("a reserved name: '", path, "'"));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<FileStorage>> FileStorage::Open(const std::string& directory, bool create) {
  std::error_code error;
  std::string absolute = std::filesystem::absolute(directory, error).lexically_normal().string();
  if (error) return Fail(ErrnoError(error.value(), directory));
  while (absolute.size() > 1 && absolute.back() == '/') absolute.pop_back();
  const std::string temporary = StrCat(absolute, "/", kTemporary);
  if (create) CKPT_RETURN_IF_ERROR(MakeDirectories(absolute));
  CKPT_RETURN_IF_ERROR(OpenTrusted(absolute, "", O_RDONLY));  // before anything is written
  if (create) CKPT_RETURN_IF_ERROR(MakeDirectories(temporary));
  RemoveLeftovers(absolute);
  return std::unique_ptr<FileStorage>(new FileStorage(std::move(absolute)));
}

void FileStorage::RemoveLeftovers(const std::string& directory) {
  std::error_code ignored;
  const std::string temporary = StrCat(directory, "/", kTemporary);
  for (const auto& entry : std::filesystem::directory_iterator(temporary, ignored)) {
    const std::string path = entry.path().string();
    struct stat status;
    if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) continue;
    // Its writer holds the lock.
    const auto lock = FileLock::Take(path, O_RDWR, LOCK_EX | LOCK_NB);
    if (lock) unlink(path.c_str());
  }
}

void FileStorage::Discard(const std::string& directory, std::string_view name) {
  const std::string path = StrCat(directory, "/", name);
  unlink(path.c_str());
  rmdir(ParentOf(path).c_str());
}

Status FileStorage::Rename(const std::string& directory, std::string_view from,
                           std::string_view to) {
  const std::string path = StrCat(directory, "/", from);
  if (rename(path.c_str(), StrCat(directory, "/", to).c_str()) != 0) {
    return Fail(SystemError("rename", path));
  }
  return SyncPath(ParentOf(path));
}

Result<std::vector<RootEntry>> FileStorage::List(std::string_view path) const {
  if (!path.empty()) CKPT_RETURN_IF_ERROR(CheckObjectPath(path));
  CKPT_ASSIGN_OR_RETURN(auto entries, ListDirectory(PathOf(path), false));
  if (path.empty()) std::erase_if(entries, [](const auto& e) { return e.name == kTemporary; });
  return entries;
}

Result<EntryStat> FileStorage::Stat(std::string_view path) const {
  if (!path.empty()) CKPT_RETURN_IF_ERROR(CheckObjectPath(path));
  const std::string full = PathOf(path);
  struct stat status;
  if (lstat(full.c_str(), &status) != 0) return Fail(SystemError("stat", full));
  return EntryStat{KindOf(status), StampOf(status), AccessOf(status)};
}

Result<std::shared_ptr<const File>> FileStorage::Open(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckObjectPath(path));
  CKPT_ASSIGN_OR_RETURN(Descriptor file, OpenTrusted(directory(), path, O_RDONLY));
  struct stat status;
  if (fstat(file.get(), &status) != 0) return Fail(SystemError("stat", PathOf(path)));
  return LocalFile::Make(std::move(file), status, PathOf(path));
}

Result<std::unique_ptr<StorageWriter>> FileStorage::Create(std::string_view path) {
  CKPT_RETURN_IF_ERROR(CheckObjectPath(path));
  CKPT_ASSIGN_OR_RETURN(std::unique_ptr<StorageWriter> writer,
                        MakeTemporary(directory(), PathOf(path)));
  return writer;
}

// The loser may rely on the winner's object, so it makes that name durable first: the
// winner may not have come to it yet.
static Status AlreadyThere(const std::string& path) {
  CKPT_RETURN_IF_ERROR(SyncPath(ParentOf(path)));
  return Fail(ErrorCode::kExists, StrCat(path, " exists"));
}

Status FileStorage::PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) {
  CKPT_RETURN_IF_ERROR(CheckObjectPath(name));
  const std::string path = PathOf(name);
  struct stat status;
  if (stat(path.c_str(), &status) == 0) return AlreadyThere(path);
  CKPT_ASSIGN_OR_RETURN(const auto writer, MakeTemporary(directory(), path));
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, bytes));
  Status published = writer->CloseIfAbsent();
  if (!published && published.error().code == ErrorCode::kExists) return AlreadyThere(path);
  return published;
}

Status FileStorage::Remove(std::string_view name) {
  CKPT_RETURN_IF_ERROR(CheckObjectPath(name));
  const std::string path = PathOf(name);
  if (unlink(path.c_str()) != 0) return Fail(SystemError("unlink", path));
  return SyncPath(ParentOf(path));
}

}  // namespace ckptfs
