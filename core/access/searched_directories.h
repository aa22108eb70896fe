// SPDX-License-Identifier: Apache-2.0
//
// The directories that a path leads through: whoever opens a file by that path
// has to be able to search each of them.  And those that processes are in.
//
// Thread safety: pure functions over the filesystem.
// BLOCKS: on stat.

#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/io/open_beneath.h"

namespace ckptfs {

// Adds `directory` and all above it, as they are spelled and as symbolic links
// resolve them now.  REQUIRES: an absolute path.
void AddSearched(const std::string& directory, std::set<std::string>& out);

// Looks at a directory, following links; nothing if the path is not a directory.
// Errors as ErrnoError.
Result<std::optional<OwnerAndMode>> AccessOfDirectory(const std::string& path);

// Where the processes are that we may look at, each path as its own namespace has it.
std::vector<std::string> WorkingDirectories();

}  // namespace ckptfs
