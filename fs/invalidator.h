// SPDX-License-Identifier: Apache-2.0
//
// Invalidator tells the kernel which names became invalid, from a thread of
// its own: the kernel may wait for requests that are being served, so no
// thread that serves one may tell it.
//
// Thread safety: Add may be called from any thread.
// Lifetime: names that are still queued when it goes are dropped.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "core/base/mutex.h"
#include "core/base/worker.h"
#include "fs/types.h"

namespace ckptfs {

class Invalidator {
 public:
  using Tell = std::function<void(InodeNumber parent, const std::string& name)>;

  // `tell` may be empty.
  explicit Invalidator(Tell tell);
  ~Invalidator();
  Invalidator(const Invalidator&) = delete;
  Invalidator& operator=(const Invalidator&) = delete;

  void Add(InodeNumber parent, std::string name);
  // The same of what may as well be left: not while many others wait, nor a directory
  // in which a process is, since `getcwd` would not answer it any more.  `path`: in
  // the mount.
  void Offer(InodeNumber parent, std::string path);
  // Wait until the kernel has been told all that was added before.
  // REQUIRES: not called from a thread that serves a request.
  void Drain();
  // Nothing is told any more.  BLOCKS: on what is being told now.
  void End();

 private:
  struct Name {
    InodeNumber parent{};
    std::string name;
    std::string offered;  // the path, if it may be left
  };
  void Append(Name name);
  Worker::Time TellAll();

  const Tell tell_;
  Mutex mutex_;
  CondVar progress_;
  std::deque<Name> queue_ GUARDED_BY(mutex_);
  uint64_t added_ GUARDED_BY(mutex_) = 0;
  uint64_t told_ GUARDED_BY(mutex_) = 0;
  Worker worker_;  // last: it uses all others
};

}  // namespace ckptfs
