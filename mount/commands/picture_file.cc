// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/picture_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/descriptor.h"
#include "core/base/strings.h"

namespace ckptfs {

Result<bool> IsPng(const std::string& path) {
  if (path.ends_with(".png") || path.ends_with(".svg")) return path.ends_with(".png");
  return Fail(ErrorCode::kInvalid, StrCat("'", path, "': the name must end in .svg or .png"));
}

Status WritePicture(const std::string& path, const Picture& picture) {
  CKPT_ASSIGN_OR_RETURN(const bool png, IsPng(path));
  const std::string bytes = png ? picture.Png() : picture.Svg();
  const Descriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!out.valid()) return Fail(ErrnoError(errno, path));
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(out.get(), bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      Error error = ErrnoError(errno, path);
      struct stat made {};
      const bool file = ::fstat(out.get(), &made) == 0 && S_ISREG(made.st_mode);
      if (file) ::unlink(path.c_str());  // half a picture shows nothing
      return Fail(std::move(error));
    }
    at += static_cast<size_t>(n);
  }
  return {};
}

}  // namespace ckptfs
