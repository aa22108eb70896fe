// SPDX-License-Identifier: Apache-2.0
//
// The stamp of the file that a path names now.
//
// Thread safety: a pure function over the filesystem.

#pragma once

#include <string>

#include "core/io/file_root.h"

namespace ckptfs {

inline Result<FileStamp> StampOfFile(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenLocalFile(path));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  return identity.stamp;
}

}  // namespace ckptfs
