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
  if (tell_) worker_.Start(Worker::kWhenWoken, [this] { return TellAll(); });
}

Invalidator::~Invalidator() { End(); }

void Invalidator::End() {
  worker_.Stop();
  MutexLock lock(mutex_);
  progress_.NotifyAll();
}

void Invalidator::Append(Name name) {
  if (!tell_) return;
  {
    MutexLock lock(mutex_);
    if (!name.offered.empty() && queue_.size() >= kMaxOffers) return;
    queue_.push_back(std::move(name));
    ++added_;
  }
  worker_.Wake();
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
  while (told_ < target && !worker_.stopping()) progress_.Wait(mutex_);
}

Worker::Time Invalidator::TellAll() {
  std::deque<Name> batch;
  {
    MutexLock lock(mutex_);
    batch.swap(queue_);
  }
  std::vector<std::string> in_use;  // looked up once for all that wait at a time
  // A caller of Drain waits for all that was added, also where an exception ends this turn.
  struct Told {
    Invalidator& of;
    uint64_t left;
    ~Told() {
      MutexLock lock(of.mutex_);
      of.told_ += left;
      of.progress_.NotifyAll();
    }
  } told{*this, batch.size()};
  for (const Name& next : batch) {
    if (worker_.stopping()) break;
    if (!next.offered.empty() && in_use.empty()) in_use = WorkingDirectories();
    const bool stays = !next.offered.empty() &&
                       std::any_of(in_use.begin(), in_use.end(), [&](const std::string& path) {
                         return path.ends_with(next.offered);
                       });
    if (!stays) tell_(next.parent, next.name);
    MutexLock lock(mutex_);
    ++told_;
    --told.left;
    progress_.NotifyAll();
  }
  return Worker::kWhenWoken;
}

}  // namespace ckptfs
