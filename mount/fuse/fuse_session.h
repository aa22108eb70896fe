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

// A process needs this to serve a mount that another one made.
struct FuseConnection {
  Descriptor device;     // /dev/fuse
  std::string greeting;  // the request by which the kernel began (FUSE_INIT), as it was
};

class FuseSession {
 public:
  // Mounts and starts answering; requests wait for Serve.
  static Result<std::unique_ptr<FuseSession>> Mount(const SessionOptions& options);
  // Goes on with the mount of another process.  What that one was asked and did not answer is
  // asked again, where the kernel can (6.9).
  static Result<std::unique_ptr<FuseSession>> Resume(const SessionOptions& options,
                                                     FuseConnection connection);
  ~FuseSession();
  FuseSession(const FuseSession&) = delete;
  FuseSession& operator=(const FuseSession&) = delete;

  // The features that the kernel granted.  BLOCKS: until INIT was answered.
  Result<SessionFeatures> WaitForInit();
  void Serve(Filesystem& filesystem) { target_.Serve(filesystem); }

  // Make the kernel forget a name.  BLOCKS: on look-ups in `parent` that are
  // being answered, so not for a thread that answers one.
  void InvalidateEntry(InodeNumber parent, const std::string& name);

  // Makes the kernel forget what it has read of a file, and its attributes.  BLOCKS: on reads of
  // it that are being answered.
  void InvalidateContent(InodeNumber inode);

  // Returns all that a successor in another process needs, while this one answers.
  Result<FuseConnection> Share() const;
  // Answers what has been asked and ends the threads; the mount stays, and its requests wait in
  // the kernel for who resumes it.  BLOCKS: on opens that are being filled.
  void Detach();
  BackingIds& backing_ids() { return target_.backing_ids(); }

  // A descriptor that becomes readable when the kernel ended the connection
  // (somebody unmounted).
  int ended_fd() const { return ended_.get(); }

  // Unmount (lazily, files may be open) and end the threads.  Nothing after Detach.
  void Stop();

 private:
  explicit FuseSession(const SessionOptions& options) : options_(options) {}
  Status Begin();
  Status Start();
  Status Greet();
  // Asks for what an earlier process did not answer.
  void AskAgain();
  void EndLoop();
  void Loop();

  const SessionOptions options_;
  RequestTarget target_;
  std::string greeting_;
  fuse_session* session_ = nullptr;
  Descriptor ended_;
  std::atomic<bool> loop_ended_{false};
  std::atomic<bool> stopped_{false};
  std::thread loop_;
};

// True if this process has CAP_SYS_ADMIN.
bool HasSysAdmin();

}  // namespace ckptfs
