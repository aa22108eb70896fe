// SPDX-License-Identifier: Apache-2.0
//
// Lru keeps the values used last, up to a bound on the sum of their weights.
// The value used last of all stays whatever it weighs: a single one above the
// bound is not made again for every use.
//
// Thread safety: all methods may be called concurrently.  Values that are
// replaced or dropped are destroyed outside the lock.
// Lifetime: of what Find returned: its own (values are copied, so they are
// pointers or small).
// Units: the weights' own, for which it is told how to weigh; a value's weight
// is taken once, when it is kept.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/base/mutex.h"

namespace ckptfs {

template <class Key, class Value, class Hash = std::hash<Key>>
class Lru {
 public:
  using Weigh = std::function<uint64_t(const Value&)>;

  // Without `weigh` each value weighs 1.
  explicit Lru(uint64_t limit, Weigh weigh = nullptr) : limit_(limit), weigh_(std::move(weigh)) {}

  // The value kept under the key, which is now the one used last.
  std::optional<Value> Find(const Key& key) {
    MutexLock lock(mutex_);
    return FindLocked(key);
  }

  // Keeps the value unless there is one under the key already; returns that
  // which is kept.
  Value Insert(const Key& key, Value value) {
    const uint64_t weight = WeightOf(value);
    Order dropped;  // destroyed after the lock
    MutexLock lock(mutex_);
    if (auto found = FindLocked(key)) return *std::move(found);
    Keep(key, value, weight, dropped);
    return value;
  }

  // Keeps the value in place of one that may be there.
  void Replace(const Key& key, Value value) {
    const uint64_t weight = WeightOf(value);
    Order dropped;
    MutexLock lock(mutex_);
    const auto found = places_.find(key);
    if (found != places_.end()) Remove(found->second, dropped);
    Keep(key, std::move(value), weight, dropped);
  }

  // Drops those for which drop(key, value) is true and returns how many.
  // REQUIRES: `drop` does not call back.
  template <class Drop>
  size_t DropIf(Drop&& drop) {
    Order dropped;
    MutexLock lock(mutex_);
    for (auto place = order_.begin(); place != order_.end();) {
      const auto next = std::next(place);
      if (drop(std::as_const(place->key), std::as_const(place->value))) Remove(place, dropped);
      place = next;
    }
    return dropped.size();
  }

  // visit(key, value) for all, the one used last first; nothing counts as used.
  // REQUIRES: `visit` does not call back.
  template <class Visit>
  void ForEach(Visit&& visit) const {
    MutexLock lock(mutex_);
    for (const Kept& kept : order_) visit(kept.key, kept.value);
  }

  uint64_t weight() const {
    MutexLock lock(mutex_);
    return weight_;
  }
  size_t size() const {
    MutexLock lock(mutex_);
    return order_.size();
  }
  uint64_t limit() const { return limit_; }

 private:
  struct Kept {
    Key key;
    Value value;
    uint64_t weight;
  };
  using Order = std::list<Kept>;  // used last first

  uint64_t WeightOf(const Value& value) const { return weigh_ ? weigh_(value) : 1; }

  std::optional<Value> FindLocked(const Key& key) EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = places_.find(key);
    if (found == places_.end()) return std::nullopt;
    order_.splice(order_.begin(), order_, found->second);
    return order_.front().value;
  }

  void Keep(const Key& key, Value value, uint64_t weight, Order& dropped)
      EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // The node is made apart: an exception leaves everything as it was.
    Order fresh;
    fresh.push_front(Kept{key, std::move(value), weight});
    places_.emplace(key, fresh.begin());
    order_.splice(order_.begin(), fresh);
    weight_ += weight;
    while (weight_ > limit_ && order_.size() > 1) Remove(std::prev(order_.end()), dropped);
  }

  void Remove(typename Order::iterator place, Order& dropped) EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    weight_ -= place->weight;
    places_.erase(place->key);
    dropped.splice(dropped.end(), order_, place);
  }

  const uint64_t limit_;
  const Weigh weigh_;
  mutable Mutex mutex_;
  Order order_ GUARDED_BY(mutex_);
  std::unordered_map<Key, typename Order::iterator, Hash> places_ GUARDED_BY(mutex_);
  uint64_t weight_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
