// SPDX-License-Identifier: Apache-2.0
//
// IoPool runs tasks that wait for a device far away, many at a time.  Arithmetic
// is ParallelFor's; this is for threads that sleep nearly always, so there may be
// more of them than processors.  They are made on demand.
//
// Thread safety: all methods may be called concurrently, also by tasks.
// Lifetime: the end waits for tasks that run and drops those that do not yet.

#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "core/base/mutex.h"

namespace ckptfs {

class IoPool {
 public:
  explicit IoPool(size_t max_threads) : max_threads_(max_threads) {}
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // In the order of the calls.  Where not even one thread can be made the caller
  // runs the task.
  void Post(std::function<void()> task);
  // False there, and the task is the caller's still.
  bool TryPost(std::function<void()>& task);

 private:
  void Work();

  const size_t max_threads_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

}  // namespace ckptfs
