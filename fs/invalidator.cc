// SPDX-License-Identifier: Apache-2.0

#include "fs/invalidator.h"

#include <mutex>

namespace ckptfs {
namespace {

constexpr size_t kMaxOffers = 4096;

}  // namespace

Invalidator::Invalidator(Tell tell) : tell_(std::move(tell)) {
  if (tell_) thread_ = std::thread([this] { Run(); });
}

Invalidator::~Invalidator() { End(); }

void Invalidator::End() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyAll();
  progress_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void Invalidator::Add(InodeNumber parent, std::string name) {
  if (!tell_) return;
  {
    MutexLock lock(mutex_);
    queue_.emplace_back(parent, std::move(name));
    ++added_;
  }
  wake_.NotifyOne();
}

void Invalidator::Offer(InodeNumber parent, std::string name) {
  {
    MutexLock lock(mutex_);
    if (queue_.size() >= kMaxOffers) return;
  }
  Add(parent, std::move(name));
}

void Invalidator::Drain() {
  MutexLock lock(mutex_);
  const uint64_t target = added_;
  while (told_ < target && !stop_) progress_.Wait(mutex_);
}

void Invalidator::Run() {
  while (true) {
    std::pair<InodeNumber, std::string> next;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stop_) wake_.Wait(mutex_);
      if (stop_) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    tell_(next.first, next.second);
    MutexLock lock(mutex_);
    ++told_;
    progress_.NotifyAll();
  }
}

}  // namespace ckptfs
