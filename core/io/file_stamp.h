// SPDX-License-Identifier: Apache-2.0
//
// Stamps of files tell that a file is still the one that was adopted, and whether its
// mode alone decides who may read it.
//
// Thread safety: pure functions.
// Units: bytes; times are nanoseconds since the epoch.

#pragma once

#include <sys/stat.h>

#include <string>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

FileStamp StampOf(const struct stat& status);

// kStale naming the file and every field that differs.  An adopted ctime of 0 is
// not compared: that of the store's hard links changes when the source is deleted.
// For a stamp that is only a size, only sizes are compared.
Status CompareStamps(const std::string& path, const FileStamp& adopted, const FileStamp& now);

OwnerAndMode AccessOf(const struct stat& status, bool acl = false);

// True if a POSIX ACL says more than the mode.
bool HasAcl(const std::string& path);

// The stamp as of now.
int64_t NowNs();

}  // namespace ckptfs
