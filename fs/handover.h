// SPDX-License-Identifier: Apache-2.0
//
// Handover is what the kernel knows of a mount: names that it looked up, and files that it has
// open.  The process that serves the mount gives it to the one that serves it next.
//
// Thread safety: a value.
// Lifetime: the descriptors of backings belong to who made the value.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fs/types.h"

namespace ckptfs {

struct KnownName {
  InodeNumber inode{};
  uint64_t references = 0;  // look-ups that the kernel has not forgotten
  std::string path;         // in the mount; "" is the root
};

struct KnownBacking {
  ServingMode mode = ServingMode::kDirect;
  int fd = -1;
};

struct KnownFile {
  FileHandle handle{};
  InodeNumber inode{};
  uint64_t size = 0;
  uint64_t streamed = 0;            // bytes that were answered by READs
  std::optional<std::string> text;  // all of the file, if it is not of a step
  std::optional<size_t> backing;    // in `backings`; without one the file is streamed
};

struct Handover {
  std::vector<KnownName> names;
  std::vector<KnownBacking> backings;
  std::vector<KnownFile> files;
  uint64_t next_handle = 1;
  std::optional<ShownStep> shown;  // what /view shows; its id is "latest" while it follows
};

// An open file of a handover, as its new process serves it.
struct TakenFile {
  InodeNumber inode{};
  OpenFile file;
};

}  // namespace ckptfs
