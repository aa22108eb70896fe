// SPDX-License-Identifier: Apache-2.0
//
// LoadingCache makes each value once for all who want it at the same time, and keeps
// those that were used last, up to a bound on the sum of their weights.  Errors are not
// kept: the next caller tries again.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: values are copied out, so they are pointers or small.
// Units: the weights' own, as for Lru.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "core/base/lru.h"
#include "core/base/single_flight.h"

namespace ckptfs {

template <class Key, class Value, class Hash = std::hash<Key>>
class LoadingCache {
 public:
  // Without `weigh` each value weighs 1.
  explicit LoadingCache(uint64_t limit, typename Lru<Key, Value, Hash>::Weigh weigh = nullptr)
      : kept_(limit, std::move(weigh)) {}

  // The value that is kept under the key, else that which make() returns, to this caller or
  // to another who is making it.  An exception in make() becomes an error.
  // BLOCKS: on make().
  template <class Make>
  Result<Value> Get(const Key& key, Make&& make) {
    if (auto known = kept_.Find(key)) return *std::move(known);
    return making_.Do(key, [&]() -> Result<Value> {
      // Another caller may have made it since the first look.
      if (auto known = kept_.Find(key)) return *std::move(known);
      Result<Value> made = make();
      if (!made) return made;
      return kept_.Insert(key, *std::move(made));
    });
  }

  // The value that is kept under the key; nothing is made.
  std::optional<Value> Find(const Key& key) { return kept_.Find(key); }

  // Drops those for which drop(key, value) is true.  REQUIRES: `drop` does not call back.
  template <class Drop>
  void DropIf(Drop&& drop) {
    kept_.DropIf(std::forward<Drop>(drop));
  }

  uint64_t weight() const { return kept_.weight(); }
  size_t size() const { return kept_.size(); }

 private:
  Lru<Key, Value, Hash> kept_;
  SingleFlight<Key, Value, Hash> making_;
};

}  // namespace ckptfs
