// SPDX-License-Identifier: Apache-2.0

#include "core/base/trust.h"

#include <unistd.h>

#include "core/base/strings.h"

namespace ckptfs {

bool IsOwnerTrusted(const struct stat& info, Believed owners) {
  return info.st_uid == ::geteuid() || (owners == Believed::kOwnUserOrRoot && info.st_uid == 0);
}

std::string WhyNotTrusted(const struct stat& info, Believed owners) {
  if (!IsOwnerTrusted(info, owners)) return StrCat("belongs to user ", info.st_uid);
  if ((info.st_mode & 022) != 0) return "can be written by its group or by others (chmod go-w)";
  return "";
}

}  // namespace ckptfs
