// SPDX-License-Identifier: Apache-2.0
//
// ListingCache keeps the children of directories that never change, so that a
// walk over a thousand ranks asks a format once per directory.
//
// Thread safety: internally synchronised.
// Units: its bound counts nodes.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/mutex.h"
#include "fs/tree/node.h"

namespace ckptfs {

struct Listing {
  std::shared_ptr<const StepEntry> step;  // whose names these are
  std::vector<NodePtr> children;          // sorted by name

  // Null if there is no such child.
  NodePtr Find(std::string_view name) const;
};

class ListingCache {
 public:
  explicit ListingCache(size_t max_nodes) : max_nodes_(max_nodes) {}

  // Null unless the directory's listing is known and is of this very entry: a
  // step adopted again has the same inodes but is another place.
  std::shared_ptr<const Listing> Find(const Node& directory);
  void Insert(const Node& directory, std::shared_ptr<const Listing> listing);
  void DropStep(const StepEntry* step);

 private:
  using Order = std::list<std::pair<uint64_t, std::shared_ptr<const Listing>>>;
  void Remove(Order::iterator place, Order& removed) EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_nodes_;
  Mutex mutex_;
  Order order_ GUARDED_BY(mutex_);  // used last first
  std::unordered_map<uint64_t, Order::iterator> places_ GUARDED_BY(mutex_);
  size_t nodes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
