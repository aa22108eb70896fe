// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {

Result<InputFile> InputFile::Open(const std::string& path) {
  // Without O_NONBLOCK a named pipe in place of a file would hang us.
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Fail(ErrnoError(errno, "open"));
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    int error = errno;
    ::close(fd);
    return Fail(ErrnoError(error, "fstat"));
  }
  InputFile file(fd, static_cast<uint64_t>(status.st_size));
  if (!S_ISREG(status.st_mode)) return Fail(ErrorCode::kInvalid, "not a regular file");
  return file;
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<std::string> InputFile::Read(uint64_t offset, uint64_t length, std::string_view what) const {
  if (!RangeInside(offset, length, size_)) {
    return Fail(ErrorCode::kInvalid,
                StrCat(what, " (bytes ", offset, " and ", length, " on) lies beyond the end of the ",
                       size_, "-byte file"));
  }
  std::string bytes(length, '\0');
  size_t done = 0;
  while (done < length) {
    ssize_t got = ::pread(fd_, bytes.data() + done, length - done,
                          static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Fail(ErrnoError(errno, "pread"));
    if (got == 0) return Fail(ErrorCode::kInvalid, StrCat(what, ": the file became shorter"));
    done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace ckptfs
