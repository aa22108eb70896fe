// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/listing_cache.h"

#include <algorithm>

namespace ckptfs {

NodePtr Listing::Find(std::string_view name) const {
  const auto place = std::lower_bound(
      children.begin(), children.end(), name,
      [](const NodePtr& node, std::string_view wanted) { return node->name() < wanted; });
  return place != children.end() && (*place)->name() == name ? *place : nullptr;
}

std::shared_ptr<const Listing> ListingCache::Find(const Node& directory) {
  MutexLock lock(mutex_);
  const auto found = places_.find(static_cast<uint64_t>(directory.inode));
  if (found == places_.end()) return nullptr;
  order_.splice(order_.begin(), order_, found->second);
  const auto& listing = order_.front().second;
  return listing->step == directory.step ? listing : nullptr;
}

void ListingCache::Remove(Order::iterator place, Order& removed) {
  nodes_ -= place->second->children.size() + 1;
  places_.erase(place->first);
  removed.splice(removed.end(), order_, place);
}

void ListingCache::Insert(const Node& directory, std::shared_ptr<const Listing> listing) {
  Order removed;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto key = static_cast<uint64_t>(directory.inode);
  const auto found = places_.find(key);
  if (found != places_.end()) Remove(found->second, removed);
  nodes_ += listing->children.size() + 1;
  order_.emplace_front(key, std::move(listing));
  places_[key] = order_.begin();
  while (nodes_ > max_nodes_ && order_.size() > 1) Remove(std::prev(order_.end()), removed);
}

void ListingCache::DropStep(const StepEntry* step) {
  Order removed;  // destroyed after the lock
  MutexLock lock(mutex_);
  for (auto place = order_.begin(); place != order_.end();) {
    const auto next = std::next(place);
    if (place->second->step.get() == step) Remove(place, removed);
    place = next;
  }
}

}  // namespace ckptfs
