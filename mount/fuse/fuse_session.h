// SPDX-License-Identifier: Apache-2.0
//
// FuseSession owns one FUSE mount: the kernel connection and the threads that
// answer it.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the destructor unmounts, ends the threads and joins them; the
// Filesystem served must outlive it.

#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "fs/filesystem.h"
#include "mount/fuse/fuse_ops.h"

namespace ckptfs {

struct SessionOptions {
  std::string mountpoint;  // absolute
  std::string source;      // shown in /proc/mounts: the store
  bool allow_other = false;
  unsigned threads = 0;  // 0: twice the cores, at least 32
  bool clone_fd = false;
};

class FuseSession {
 public:
  // Mounts and starts answering; requests wait for Serve.
  static Result<std::unique_ptr<FuseSession>> Mount(const SessionOptions& options);
  ~FuseSession();
  FuseSession(const FuseSession&) = delete;
  FuseSession& operator=(const FuseSession&) = delete;

  // The features that the kernel granted.  BLOCKS: until INIT was answered.
  Result<SessionFeatures> WaitForInit();
  void Serve(Filesystem& filesystem) { target_.Serve(filesystem); }

  // Make the kernel forget a name.  BLOCKS: on look-ups in `parent` that are
  // being answered, so not for a thread that answers one.
  void InvalidateEntry(InodeNumber parent, const std::string& name);

  // A descriptor that becomes readable when the kernel ended the connection
  // (somebody unmounted).
  int ended_fd() const { return ended_.get(); }

  // Unmount (lazily, files may be open) and end the threads.
  void Stop();

 private:
  explicit FuseSession(const SessionOptions& options) : options_(options) {}
  Status Start();
  void Loop();

  const SessionOptions options_;
  RequestTarget target_;
  fuse_session* session_ = nullptr;
  Descriptor ended_;
  std::atomic<bool> loop_ended_{false};
  std::atomic<bool> stopped_{false};
  std::thread loop_;
};

// True if this process has CAP_SYS_ADMIN.
bool HasSysAdmin();

}  // namespace ckptfs
