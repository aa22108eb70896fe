// SPDX-License-Identifier: Apache-2.0
//
// The FUSE requests: each handler decodes one, calls fs::Filesystem, and
// replies exactly once.  It decides nothing.  Requests that would write are
// absent: the mount is read-only.
//
// Thread safety: handlers run concurrently on libfuse's threads; no lock is
// held across a reply.
// Lifetime: RequestTarget is the session's userdata and outlives its loop.

#pragma once

#include <fuse_lowlevel.h>

#include <atomic>

#include "fs/filesystem.h"
#include "mount/fuse/backing_ids.h"
#include "mount/fuse/fuse_session.h"

namespace ckptfs {

// The features that the kernel granted in INIT.
struct SessionFeatures {
  bool passthrough = false;
  bool direct_io_mmap = false;
};

// The filesystem that the handlers serve.  Requests that arrive before Serve wait; after
// Abandon they are answered EIO.
class RequestTarget {
 public:
  void Serve(Filesystem& filesystem);
  void Abandon();

  // BLOCKS: until Serve or Abandon; null after Abandon.
  Filesystem* WaitForFilesystem();

  // BLOCKS: until INIT was answered or Abandon; false after Abandon.
  bool WaitForInit();
  void InitDone(const SessionFeatures& features);
  const SessionFeatures& features() const { return features_; }

  BackingIds& backing_ids() { return backing_ids_; }

 private:
  enum State : int { kStarting = 0, kInitialised = 1, kServing = 2, kAbandoned = 3 };

  std::atomic<int> state_{kStarting};
  SessionFeatures features_;
  Filesystem* filesystem_ = nullptr;
  BackingIds backing_ids_;
};

// The handlers of a session that shows views.  `target` must outlive it.
SessionHandlers ViewHandlers(RequestTarget& target);

}  // namespace ckptfs
