// SPDX-License-Identifier: Apache-2.0

#include "core/io/local_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/base/strings.h"
#include "core/io/file_stamp.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxRead = size_t{1} << 30;  // per system call
constexpr size_t kFew = 2;                    // requests for which asking first gains nothing

// Reads the first requests, as long as they are in memory; returns how many.
size_t ReadCached(int file, std::span<const ReadRequest> requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const iovec out{requests[i].out.data(), requests[i].out.size()};
    const ssize_t n = preadv2(file, &out, 1, static_cast<off_t>(requests[i].offset), RWF_NOWAIT);
    if (n < 0 || static_cast<size_t>(n) < out.iov_len) return i;
  }
  return requests.size();
}

class FileMapping final : public Mapping {
 public:
  FileMapping(void* address, size_t length)
      : Mapping({static_cast<const std::byte*>(address), length}) {}
  ~FileMapping() override {
    if (!bytes().empty()) munmap(const_cast<std::byte*>(bytes().data()), bytes().size());
  }
};

}  // namespace

EntryKind KindOf(const struct stat& status) {
  if (S_ISREG(status.st_mode)) return EntryKind::kFile;
  return S_ISDIR(status.st_mode) ? EntryKind::kDirectory : EntryKind::kOther;
}

Result<std::shared_ptr<const LocalFile>> LocalFile::Make(Descriptor file, const struct stat& status,
                                                         std::string name) {
  if (!S_ISREG(status.st_mode)) {
    return Fail(ErrorCode::kInvalid, StrCat(name, " is not a regular file"));
  }
  return std::shared_ptr<const LocalFile>(
      new LocalFile(std::move(file), static_cast<uint64_t>(status.st_size), std::move(name)));
}

Result<FileIdentity> LocalFile::Identity() const {
  struct stat status;
  if (fstat(file_.get(), &status) != 0) return Fail(ErrnoError(errno, StrCat("stat ", name())));
  const bool acl = fgetxattr(file_.get(), "system.posix_acl_access", nullptr, 0) > 0;
  return FileIdentity{StampOf(status), AccessOf(status, acl)};
}

Status LocalFile::ReadAt(std::span<const ReadRequest> requests) const {
  CKPT_RETURN_IF_ERROR(CheckRanges(requests));
  // All reads are on their way before the first is waited for.  For bytes in memory that
  // would be a second call per request.
  if (requests.size() > kFew) requests = requests.subspan(ReadCached(file_.get(), requests));
  for (size_t i = 0; requests.size() > kFew && i < requests.size(); ++i) {
    (void)posix_fadvise(file_.get(), static_cast<off_t>(requests[i].offset),
                        static_cast<off_t>(requests[i].out.size()), POSIX_FADV_WILLNEED);
  }
  for (const ReadRequest& request : requests) {
    for (size_t done = 0; done < request.out.size();) {
      const ssize_t n = pread(file_.get(), request.out.data() + done,
                              std::min(request.out.size() - done, kMaxRead),
                              static_cast<off_t>(request.offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Fail(ErrnoError(errno, StrCat("read ", name())));
      if (n == 0) {
        return Fail(ErrorCode::kDataLoss, StrCat(name(), " became shorter while it was read"));
      }
      done += static_cast<size_t>(n);
    }
  }
  return {};
}

Result<std::shared_ptr<const Mapping>> LocalFile::Map() const {
  void* address = nullptr;
  if (size() > 0) {
    address = mmap(nullptr, size(), PROT_READ, MAP_SHARED, file_.get(), 0);
    if (address == MAP_FAILED) return Fail(ErrnoError(errno, StrCat("mmap ", name())));
  }
  return std::make_shared<const FileMapping>(address, size());
}

}  // namespace ckptfs
