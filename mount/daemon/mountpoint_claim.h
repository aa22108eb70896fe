// SPDX-License-Identifier: Apache-2.0
//
// MountpointClaim keeps others from mounting at a place while somebody does: whether a mount is
// there and mounting are two calls, and the kernel stacks what comes second.
//
//   <runtime directory>/<hash of the mount point>.mounting   locked, by the user's own processes
//   the mount point's directory, before it is covered        locked, by those of all users
//
// A lock ends with its process.  Where there are no locks nobody is kept out.
//
// Thread safety: immutable.
// Lifetime: the claim ends with the object; the first file goes with it.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

class MountpointClaim {
 public:
  // By name, whatever lies there: before what is left of an earlier mount is cleaned up.
  // `mountpoint` is absolute and without links.  kExists if another process claims it.
  static Result<MountpointClaim> Take(const std::string& mountpoint);
  MountpointClaim(MountpointClaim&&) noexcept = default;
  ~MountpointClaim();

  // The directory as well, which is there and not a mount of ours.  kExists likewise.
  Status TakeDirectory();

 private:
  explicit MountpointClaim(std::string mountpoint) : mountpoint_(std::move(mountpoint)) {}

  std::string mountpoint_;
  std::string name_file_;
  Descriptor name_;
  Descriptor directory_;
};

struct MountpointNeeds {
  std::string path;  // absolute and without links
  bool mkdir = false;
  bool nonempty = false;  // it may have files in it, which are hidden
  // (what it is, its directory): these must not lie under the mount point.  "" is nowhere.
  std::vector<std::pair<std::string, std::string>> outside;
};

// Makes a place fit to be mounted at: cleans up a dead mount, makes the directory, and claims it.
Status PrepareMountpoint(const MountpointNeeds& needs, MountpointClaim& claim);

}  // namespace ckptfs
