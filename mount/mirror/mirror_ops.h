// SPDX-License-Identifier: Apache-2.0
//
// The FUSE requests of a mirror: each handler decodes one, calls Mirror, and replies exactly once.
// Where the kernel can, it reads and writes the files of the disk itself (passthrough), and no READ
// or WRITE comes here.  All opens of an inode share one backing id, which the kernel demands.
//
// The kernel checks modes and ACLs of what it remembers (default_permissions); the disk checks
// every operation once more, as the caller.
//
// Thread safety: handlers run concurrently on libfuse's threads; no lock is held across a reply.
// Lifetime: MirrorTarget is the session's userdata and outlives its loop; its mirror outlives it.

#pragma once

#include <atomic>
#include <cstdint>

#include "mount/fuse/backing_ids.h"
#include "mount/fuse/fuse_session.h"
#include "mount/mirror/mirror.h"

namespace ckptfs {

class MirrorTarget {
 public:
  // `passthrough`: this process may register files with the kernel.
  MirrorTarget(Mirror& mirror, bool passthrough) : mirror_(mirror), may_pass_(passthrough) {}

  Mirror& mirror() { return mirror_; }
  BackingIds& backing_ids() { return backing_ids_; }

  // As INIT was answered.
  void InitDone(bool passthrough, bool direct_io_mmap) {
    passthrough_ = passthrough && may_pass_;
    direct_io_mmap_ = direct_io_mmap;
  }
  bool passthrough() const { return passthrough_; }
  bool direct_io_mmap() const { return direct_io_mmap_; }

  // READ and WRITE requests that were answered, and files that could not be passed through though
  // others are.
  std::atomic<uint64_t> reads{0}, writes{0}, refused{0};

 private:
  Mirror& mirror_;
  const bool may_pass_;
  std::atomic<bool> passthrough_{false};
  std::atomic<bool> direct_io_mmap_{false};
  BackingIds backing_ids_;
};

// `target` must outlive the session.
SessionHandlers MirrorHandlers(MirrorTarget& target);

}  // namespace ckptfs
