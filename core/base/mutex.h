// SPDX-License-Identifier: Apache-2.0
//
// A mutex whose guarded members the compiler can check (clang -Wthread-safety), and what
// waits for a change of them.  No lock is ever held across I/O, a FUSE reply or a foreign
// call; the whole order is in docs/inside/locks.md.
//
// Thread safety: that is the point.

#pragma once

#include <chrono>
#include <condition_variable>
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

 private:
  friend class CondVar;
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

// Waits may end without a reason: look again.
class CondVar {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void Wait(Mutex& mutex) EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
    moved_.wait(held);
    held.release();
  }
  // False when the time is over.
  bool WaitUntil(Mutex& mutex, Time end) EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> held(mutex.mutex_, std::adopt_lock);
    const bool moved = moved_.wait_until(held, end) == std::cv_status::no_timeout;
    held.release();
    return moved;
  }
  void NotifyOne() { moved_.notify_one(); }
  void NotifyAll() { moved_.notify_all(); }

 private:
  std::condition_variable moved_;
};

}  // namespace ckptfs
