// SPDX-License-Identifier: Apache-2.0

#include "mount/ownership.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <set>
#include <vector>

#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/blob/file_stamp.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;

constexpr size_t kCopyChunk = 64 << 20;
constexpr size_t kBufferBytes = 4 << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::string DigestOfFiles(const StepModel& model, Ownership ownership) {
  std::string text = ownership == Ownership::kLink ? "link" : "copy";
  std::vector<std::string> lines;
  for (const Blob& blob : model.blobs) {
    lines.push_back(StrCat(blob.path, "\n", blob.stamp.size, " ", blob.stamp.mtime_ns, " ",
                           blob.stamp.inode, "\n"));
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) text += line;
  return DigestOf(text).Hex();
}

Status SyncPath(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd() < 0 || ::fsync(file.fd()) != 0) return Fail(ErrnoError(errno, path));
  return {};
}

// True where the kernel does not copy between these filesystems by itself.
bool NeedsBuffer(int error) {
  return error == EXDEV || error == EINVAL || error == EOPNOTSUPP || error == ENOSYS;
}

// Up to a buffer's bytes, from and to the files' positions.
ssize_t CopySome(int from, int to, std::vector<char>& buffer) {
  const ssize_t count = ::read(from, buffer.data(), buffer.size());
  for (ssize_t done = 0; done < count;) {
    const ssize_t written =
        ::write(to, buffer.data() + done, static_cast<size_t>(count - done));
    if (written < 0 && errno != EINTR) return -1;
    done += std::max<ssize_t>(written, 0);
  }
  return count;
}

Status CopyBytes(int from, int to, uint64_t size, const std::string& name) {
  std::vector<char> buffer;  // empty while the kernel copies
  for (uint64_t done = 0; done < size;) {
    const ssize_t count =
        buffer.empty() ? ::copy_file_range(from, nullptr, to, nullptr,
                                           std::min<uint64_t>(size - done, kCopyChunk), 0)
                       : CopySome(from, to, buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && buffer.empty() && NeedsBuffer(errno)) {
      buffer.resize(kBufferBytes);
      continue;
    }
    if (count < 0) return Fail(ErrnoError(errno, StrCat("copying ", name)));
    if (count == 0) return Fail(ErrorCode::kStale, StrCat(name, " was cut while it was copied"));
    done += static_cast<uint64_t>(count);
  }
  return {};
}

// A reflink, or a copy unless `only_reflink` (then kUnsupported).
Status Duplicate(const std::string& from, const std::string& to, bool only_reflink) {
  const Descriptor source(::open(from.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
  struct stat info {};
  if (source.fd() < 0 || ::fstat(source.fd(), &info) != 0) return Fail(ErrnoError(errno, from));
  const Descriptor copy(::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (copy.fd() < 0) return Fail(ErrnoError(errno, to));
  if (::ioctl(copy.fd(), FICLONE, source.fd()) != 0) {
    if (only_reflink) {
      ::unlink(to.c_str());
      return Fail(ErrorCode::kUnsupported, "no reflinks here");
    }
    CKPT_RETURN_IF_ERROR(CopyBytes(source.fd(), copy.fd(), static_cast<uint64_t>(info.st_size), from));
  }
  // Who may see the step follows from the files' owners and modes.
  if (::geteuid() == 0 && ::fchown(copy.fd(), info.st_uid, info.st_gid) != 0) {
    return Fail(ErrnoError(errno, to));
  }
  const timespec times[2] = {info.st_atim, info.st_mtim};
  if (::fchmod(copy.fd(), info.st_mode & 0777) != 0 || ::futimens(copy.fd(), times) != 0 ||
      ::fsync(copy.fd()) != 0) {
    return Fail(ErrnoError(errno, to));
  }
  return {};
}

Status TakeFile(const std::string& from, const std::string& to, Ownership ownership) {
  if (ownership == Ownership::kCopy) return Duplicate(from, to, false);
  Status reflinked = Duplicate(from, to, true);
  if (reflinked || reflinked.error().code != ErrorCode::kUnsupported) return reflinked;
  if (::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) == 0) return {};
  if (errno == EXDEV || errno == EPERM || errno == EMLINK) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(from, ": cannot be linked into the store (another filesystem, or not "
                             "yours); use --copy, or a store beside it"));
  }
  return Fail(ErrnoError(errno, to));
}

// Every file of the step to `to`, then the directories made durable.
Status TakeFiles(const StepCandidate& step, const StepModel& model, const std::string& to,
                 Ownership ownership) {
  std::error_code error;
  files::create_directories(to, error);
  std::set<std::string> directories = {to};
  for (const Blob& blob : model.blobs) {
    const files::path from = files::path(model.roots[blob.root]) / blob.path;
    const files::path name = from.lexically_normal().lexically_relative(step.directory);
    if (name.empty() || *name.begin() == "..") {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(from.string(), " lies outside of ", step.directory,
                         ": the store can only refer to it"));
    }
    files::path parent = files::path(to) / name.parent_path();
    files::create_directories(parent, error);
    for (; parent.string().size() > to.size(); parent = parent.parent_path()) {
      directories.insert(parent.string());
    }
    CKPT_RETURN_IF_ERROR(TakeFile(from.string(), to + "/" + name.string(), ownership));
  }
  if (error) return Fail(ErrnoError(error.value(), to));
  for (const std::string& directory : directories) CKPT_RETURN_IF_ERROR(SyncPath(directory));
  return {};
}

// The files are still those that were read, but for the change time, which our
// own links alter.
Status Unchanged(const StepModel& model) {
  for (const Blob& blob : model.blobs) {
    const std::string path = model.roots[blob.root] + "/" + blob.path;
    CKPT_ASSIGN_OR_RETURN(BlobStamp now, StampOfFile(path));
    now.ctime_ns = blob.stamp.ctime_ns;
    CKPT_RETURN_IF_ERROR(CompareStamps(path, blob.stamp, now));
  }
  return {};
}

// What a killed process left: "<digest>.partial-<pid>".
void RemoveLeftOvers(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : files::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    const size_t at = name.find(".partial-");
    if (at == std::string::npos) continue;
    pid_t pid = 0;
    std::from_chars(name.data() + at + 9, name.data() + name.size(), pid);
    std::error_code ignored;
    if (pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH) files::remove_all(entry.path(), ignored);
  }
}

}  // namespace

Result<std::string> TakeOwnership(const std::string& store, const StepCandidate& step,
                                  const StepModel& model, Ownership ownership) {
  const std::string blobs = store + "/blobs";
  const std::string whole = StrCat(blobs, "/", DigestOfFiles(model, ownership));
  const std::string tag = files::path(step.directory).filename().string();
  if (files::exists(whole)) return whole + "/" + tag;
  if (::mkdir(blobs.c_str(), 0700) != 0 && errno != EEXIST) return Fail(ErrnoError(errno, blobs));
  RemoveLeftOvers(blobs);
  const std::string partial = StrCat(whole, ".partial-", ::getpid());
  Status taken = TakeFiles(step, model, partial + "/" + tag, ownership);
  if (taken) taken = Unchanged(model);
  if (taken) taken = SyncPath(partial);
  std::error_code error;
  if (taken) files::rename(partial, whole, error);
  const bool raced = error && files::exists(whole);  // another process took it meanwhile
  if (!taken || error) {
    std::error_code ignored;
    files::remove_all(partial, ignored);
  }
  if (!taken) return Fail(std::move(taken).error());
  if (error && !raced) return Fail(ErrnoError(error.value(), whole));
  CKPT_RETURN_IF_ERROR(SyncPath(blobs));
  return whole + "/" + tag;
}

void MarkOwned(StepModel& model) {
  for (Blob& blob : model.blobs) {
    blob.store_owned = true;
    blob.stamp.ctime_ns = 0;
  }
}

}  // namespace ckptfs
