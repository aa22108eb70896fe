// SPDX-License-Identifier: Apache-2.0

#include "core/io/io_pool.h"

#include <mutex>
#include <system_error>
#include <utility>

namespace ckptfs {

IoPool::~IoPool() {
  std::deque<std::function<void()>> dropped;
  std::vector<std::thread> threads;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
    threads.swap(threads_);
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads) thread.join();
}

bool IoPool::TryPost(std::function<void()>& task) {
  {
    MutexLock lock(mutex_);
    const bool enough = idle_ > tasks_.size() || threads_.size() >= max_threads_;
    if (!enough) {
      try {
        threads_.emplace_back([this] { Work(); });
      } catch (const std::system_error&) {
        // Those that there are will come to it.
      }
    }
    if (threads_.empty()) return false;
    tasks_.push_back(std::move(task));
    task = nullptr;
  }
  wake_.NotifyOne();
  return true;
}

void IoPool::Post(std::function<void()> task) {
  if (!TryPost(task)) task();
}

void IoPool::Work() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(mutex_);
      ++idle_;
      while (tasks_.empty() && !stopping_) wake_.Wait(mutex_);
      --idle_;
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace ckptfs
