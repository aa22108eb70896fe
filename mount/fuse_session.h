// SPDX-License-Identifier: Apache-2.0
//
// FuseSession owns one FUSE mount: the kernel connection, the threads that
// answer it, and the thread that tells the kernel which names became invalid
// (never a request's own thread: the kernel would wait for itself).
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the destructor unmounts, ends the threads and joins them; the
// Filesystem served must outlive it.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "fs/filesystem.h"
#include "mount/fuse_ops.h"

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

  // What the kernel granted.  BLOCKS: until INIT was answered.
  Result<SessionFeatures> WaitForInit();
  void Serve(Filesystem& filesystem) { target_.Serve(filesystem); }

  // Queue a notification; returns at once.
  void InvalidateEntry(InodeNumber parent, std::string_view name);

  // A descriptor that becomes readable when the kernel ended the connection
  // (somebody unmounted).
  int ended_fd() const { return ended_fd_; }

  // Unmount (lazily, files may be open) and end the threads.
  void Stop();

 private:
  explicit FuseSession(const SessionOptions& options) : options_(options) {}
  Status Start();
  void Loop();
  // The condition variable takes the native lock, which the analysis cannot see.
  void Notify() CKPT_THREAD_ATTRIBUTE(no_thread_safety_analysis);

  const SessionOptions options_;
  RequestTarget target_;
  fuse_session* session_ = nullptr;
  int ended_fd_ = -1;
  std::atomic<bool> loop_ended_{false};
  std::atomic<bool> stopped_{false};

  Mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<InodeNumber, std::string>> invalid_ GUARDED_BY(mutex_);
  bool notifier_ends_ GUARDED_BY(mutex_) = false;
  std::thread loop_;
  std::thread notifier_;
};

}  // namespace ckptfs
