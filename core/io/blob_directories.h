// SPDX-License-Identifier: Apache-2.0
//
// The directories of blobs that a store owns, and the locks of their holders:
//
//   blobs/<digest>              a step that was copied or linked (core/adopt/own.h)
//   blobs/snapshots/<digest>    a snapshot's rank files
//   blobs/<digest>.partial-*    one that is not whole, or half removed
//   holds/<digest>              locked by a process that has something of that name in work
//
// A writer holds a name (a shared flock) from before it looks for, or makes, the directory
// until its step is published; who removes one holds it alone.  A lock ends with its
// process, on whichever machine, and is a file's, since NFS has none for directories.
// Nothing that is not named so is ours, and no symbolic link is followed.
//
// Thread safety: the functions may be called concurrently, also by several processes.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/result.h"

namespace ckptfs {

// "<digest>" or "snapshots/<digest>" of a path below blobs/ that lies in such a
// directory; else empty.
std::string_view BlobDirectoryOf(std::string_view path);

// All that an absolute path may lie in, whatever the store is called there: another
// mount of it, a link.
std::vector<std::string> BlobDirectoriesOf(const std::string& path);

// The name of a directory (as above) until the result is gone.
// BLOCKS: on who is removing it.
Result<std::shared_ptr<const void>> HoldBlobDirectory(const std::string& store,
                                                      std::string_view directory);
// Alone; null if somebody holds it, or there are no locks.
std::unique_ptr<const FileLock> ClaimBlobDirectory(const std::string& store,
                                                   std::string_view directory);

// All there are, by their paths below blobs/, partial ones too; sorted.
Result<std::vector<std::string>> ListBlobDirectories(const std::string& store);

// The bytes of the files that have no other name.
uint64_t BytesOfBlobDirectory(const std::string& store, const std::string& directory);

// Gone at once under its name, then in fact; what is left of a process that was killed
// meanwhile is a partial one.  REQUIRES: the caller has claimed it.
Status RemoveBlobDirectory(const std::string& store, const std::string& directory);

// Lock files of what is not there any more.
void RemoveUnusedHolds(const std::string& store);

}  // namespace ckptfs
