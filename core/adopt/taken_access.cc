// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/taken_access.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/strings.h"

namespace ckptfs {

Status TakeAccess(int to, const std::string& name, const OwnerAndMode& from, uint32_t at_least) {
  if (::geteuid() == 0 && ::fchown(to, from.uid, from.gid) != 0) {
    return Fail(ErrnoError(errno, StrCat("setting the owner of ", name)));
  }
  if (::fchmod(to, from.CertainMode() | at_least) != 0) {
    return Fail(ErrnoError(errno, StrCat("setting the mode of ", name)));
  }
  return {};
}

}  // namespace ckptfs
