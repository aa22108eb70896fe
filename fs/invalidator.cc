// SPDX-License-Identifier: Apache-2.0

#include "fs/invalidator.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "core/access/searched_directories.h"

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

void Invalidator::Append(Name name) {
  if (!tell_) return;
  {
    MutexLock lock(mutex_);
    if (!name.offered.empty() && queue_.size() >= kMaxOffers) return;
    queue_.push_back(std::move(name));
    ++added_;
  }
  wake_.NotifyOne();
}

void Invalidator::Add(InodeNumber parent, std::string name) {
  Append({parent, std::move(name), {}});
}

void Invalidator::Offer(InodeNumber parent, std::string path) {
  Append({parent, path.substr(path.rfind('/') + 1), std::move(path)});
}

void Invalidator::Drain() {
  MutexLock lock(mutex_);
  const uint64_t target = added_;
  while (told_ < target && !stop_) progress_.Wait(mutex_);
}

void Invalidator::Run() {
  std::deque<Name> batch;
  std::vector<std::string> in_use;  // looked up once for all that wait at a time
  while (true) {
    {
      MutexLock lock(mutex_);
      while (batch.empty() && queue_.empty() && !stop_) wake_.Wait(mutex_);
      if (stop_) return;
      if (batch.empty()) {
        batch.swap(queue_);
        in_use.clear();
      }
    }
    const Name next = std::move(batch.front());
    batch.pop_front();
    if (!next.offered.empty() && in_use.empty()) in_use = WorkingDirectories();
    const bool stays = !next.offered.empty() &&
                       std::any_of(in_use.begin(), in_use.end(), [&](const std::string& path) {
                         return path.ends_with(next.offered);
                       });
    if (!stays) tell_(next.parent, next.name);
    MutexLock lock(mutex_);
    ++told_;
    progress_.NotifyAll();
  }
}

}  // namespace ckptfs
