// SPDX-License-Identifier: Apache-2.0
//
// Stamps of files: what tells that a file is still the one that was adopted;
// and whether its mode is all there is to who may read it.
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

// Of the file a path names now (symbolic links followed).  kInvalid unless it
// is a regular file.
Result<FileStamp> StampOfFile(const std::string& path);

// kStale naming the file and every field that differs.  An adopted ctime of 0 is
// not compared: of the store's hard links it changes when the source is deleted.
// Of a stamp that is a size only nothing else is.
Status CompareStamps(const std::string& path, const FileStamp& adopted, const FileStamp& now);

// True if a POSIX ACL says more than the mode.
bool HasAcl(const std::string& path);

}  // namespace ckptfs
