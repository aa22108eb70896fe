// SPDX-License-Identifier: Apache-2.0
//
// A mutex whose guarded members the compiler can check (clang
// -Wthread-safety).  No lock is ever held across I/O, a FUSE reply or a
// foreign call; the whole order is in docs/locks.md.
//
// Thread safety: that is the point.

#pragma once

#include <mutex>

#if defined(__clang__)
#define CKPT_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define CKPT_THREAD_ATTRIBUTE(x)
#endif
#define GUARDED_BY(x) CKPT_THREAD_ATTRIBUTE(guarded_by(x))
#define EXCLUSIVE_LOCKS_REQUIRED(x) CKPT_THREAD_ATTRIBUTE(exclusive_locks_required(x))

namespace ckptfs {

class CKPT_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void Lock() CKPT_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void Unlock() CKPT_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  std::mutex& native() { return mutex_; }  // for condition variables only

 private:
  std::mutex mutex_;
};

class CKPT_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) CKPT_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() CKPT_THREAD_ATTRIBUTE(release_capability()) { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace ckptfs
