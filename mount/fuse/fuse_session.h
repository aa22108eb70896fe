// SPDX-License-Identifier: Apache-2.0
//
// FuseSession owns one FUSE mount: the kernel connection and the threads that
// answer it.  Which filesystem it is say the handlers that it is given.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the destructor unmounts, ends the threads and joins them; what the
// handlers use must outlive it.

#pragma once

#include <fuse_lowlevel.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "fs/types.h"

namespace ckptfs {

inline constexpr uint32_t kMaxRequestBytes = 1 << 20;  // of one READ or WRITE

// The answers to a session's requests.
struct SessionHandlers {
  const fuse_lowlevel_ops* operations = nullptr;
  void* userdata = nullptr;
  // Has handlers that wait for something answer at once: the mount ends.  May be empty.
  std::function<void()> abandon = {};
};

enum class MountAccess : uint8_t { kRead, kWrite };

struct SessionOptions {
  std::string mountpoint;  // absolute
  std::string source;      // shown in /proc/mounts: the store
  MountAccess access = MountAccess::kRead;
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
  // Mounts and starts answering; the kernel's greeting (INIT) has been answered then.
  static Result<std::unique_ptr<FuseSession>> Mount(const SessionOptions& options,
                                                    SessionHandlers handlers);
  // Goes on with the mount of another process.  What that one was asked and did not answer is
  // asked again, where the kernel can (6.9).
  static Result<std::unique_ptr<FuseSession>> Resume(const SessionOptions& options,
                                                     SessionHandlers handlers,
                                                     FuseConnection connection);
  ~FuseSession();
  FuseSession(const FuseSession&) = delete;
  FuseSession& operator=(const FuseSession&) = delete;

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

  // A descriptor that becomes readable when the kernel ended the connection
  // (somebody unmounted).
  int ended_fd() const { return ended_.get(); }

  // Unmount (lazily, files may be open) and end the threads.  Nothing after Detach.
  void Stop();

 private:
  FuseSession(const SessionOptions& options, SessionHandlers handlers)
      : options_(options), handlers_(std::move(handlers)) {}
  Status Begin();
  Status Start();
  Status Greet();
  // Asks for what an earlier process did not answer.
  void AskAgain();
  void EndLoop();
  void Loop();

  const SessionOptions options_;
  const SessionHandlers handlers_;
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
