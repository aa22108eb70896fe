// SPDX-License-Identifier: Apache-2.0
//
// RootDirectory opens files below a directory by names that somebody else chose
// (a manifest) and in directories that somebody else may change meanwhile.
//
// A path of plain names is resolved by the kernel in one step that follows
// nothing and leaves nothing (openat2).  Where a symbolic link is met, the path
// is walked name by name, and a link counts as its owner: it leads no further
// than its owner and group could open by themselves, unless it is root's or
// ours.  So `blobs/` beside `snapshots/` of a hub's cache can be linked to, also
// out of the root, and a link to what is not its owner's is refused.  Nothing
// below /proc is a link's target.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: owns a descriptor of the directory, not of what is in it.
// Units: modes are st_mode permission bits.

#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

// A regular file, open for reading: everything that counts is `status`, which is
// of this descriptor.
struct OpenedFile {
  Descriptor file;
  struct stat status {};
};

// A file as a look finds it.
struct FoundFile {
  struct stat status {};
  OwnerAndMode access;
  // The directories searched from the first link on; empty if there is none.
  std::vector<OwnerAndMode> searched;
  bool linked = false;
};

class RootDirectory {
 public:
  static Result<RootDirectory> Open(const std::string& path);

  // `path` is relative, of plain names.  kNotFound, kPermission (also of a link
  // that its owner could not follow), kInvalid for what is not a regular file,
  // kStale if names were exchanged meanwhile.  A fifo in the file's place does
  // not block.
  Result<OpenedFile> OpenFile(const std::string& path) const;
  Result<FoundFile> Look(const std::string& path) const;

  // The stamp of the directory itself.
  Result<OwnerAndMode> Access() const;
  const std::string& path() const { return path_; }

 private:
  RootDirectory(Descriptor directory, std::string path)
      : directory_(std::move(directory)), path_(std::move(path)) {}

  Descriptor directory_;
  std::string path_;
};

// RootDirectory::Open and OpenFile.
Result<OpenedFile> OpenBeneath(const std::string& root, const std::string& path);

}  // namespace ckptfs
