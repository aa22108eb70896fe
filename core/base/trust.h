// SPDX-License-Identifier: Apache-2.0
//
// The one rule by which an object of the filesystem is believed: whose it is, and who else
// may have written into it.
//
// Thread safety: pure functions.
// Units: modes are st_mode permission bits.

#pragma once

#include <sys/stat.h>

#include <string>

namespace ckptfs {

enum class Believed {
  kOwnUser,        // what this process's effective user made
  kOwnUserOrRoot,  // or root
};

// The owner is believed.
bool IsOwnerTrusted(const struct stat& info, Believed owners);
// Says why the object is not believed, as the rest of a sentence about it ("belongs to user
// 7"); else returns "".  Nobody but its owner may write it.
std::string WhyNotTrusted(const struct stat& info, Believed owners);

}  // namespace ckptfs
