// SPDX-License-Identifier: Apache-2.0
//
// ViewCache keeps what a view format derived from one (step, layout), so that
// a listing of a thousand ranks derives it once.  Entries are keyed by the
// step's InstanceId, which is never reused, and the least recently used one is
// dropped above a bound; an entry in use stays alive by its shared_ptr.
//
// Thread safety: all methods may be called concurrently; the lock is not held
// while an entry is built (two threads may build the same one, the first wins).
// Lifetime: entries must not refer to the cache; they may hold indexes into
// the step, not pointers to it.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

template <class Value>
class ViewCache {
 public:
  explicit ViewCache(size_t bound = 16) : bound_(bound) {}

  // The cached value, or `build(step, layout)`'s, which is kept unless it is an
  // error.
  template <class Build>
  Result<std::shared_ptr<const Value>> Get(const StepModel& step, const Layout& layout,
                                           Build&& build) {
    const Key key{step.instance.value(), layout.ToString()};
    if (auto found = Find(key)) return found;
    CKPT_ASSIGN_OR_RETURN(std::shared_ptr<const Value> value, build(step, layout));
    return Insert(key, std::move(value));
  }

 private:
  using Key = std::pair<uint64_t, std::string>;
  using Entry = std::pair<Key, std::shared_ptr<const Value>>;

  std::shared_ptr<const Value> Find(const Key& key) {
    MutexLock lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->first != key) continue;
      entries_.splice(entries_.begin(), entries_, it);
      return entries_.front().second;
    }
    return nullptr;
  }

  std::shared_ptr<const Value> Insert(const Key& key, std::shared_ptr<const Value> value) {
    if (auto found = Find(key)) return found;
    MutexLock lock(mutex_);
    entries_.emplace_front(key, std::move(value));
    auto newest = entries_.front().second;
    if (entries_.size() > bound_) entries_.pop_back();
    return newest;
  }

  const size_t bound_;
  Mutex mutex_;
  std::list<Entry> entries_ GUARDED_BY(mutex_);  // most recently used first
};

}  // namespace ckptfs
