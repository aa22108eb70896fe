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

uint64_t Listing::Bytes() const {
  constexpr uint64_t kOfAllocations = 48;  // headers, reference counts
  uint64_t bytes = sizeof(Listing) + children.capacity() * sizeof(NodePtr);
  for (const NodePtr& child : children) {
    bytes += sizeof(Node) + child->path.capacity() + child->target.capacity() + kOfAllocations;
  }
  return bytes;
}

std::shared_ptr<const Listing> ListingCache::Find(const Node& directory) {
  MutexLock lock(mutex_);
  const auto found = places_.find(static_cast<uint64_t>(directory.inode));
  if (found == places_.end()) return nullptr;
  order_.splice(order_.begin(), order_, found->second);
  const auto& listing = order_.front().listing;
  return listing->step == directory.step ? listing : nullptr;
}

void ListingCache::Remove(Order::iterator place, Order& removed) {
  bytes_ -= place->bytes;
  places_.erase(place->inode);
  removed.splice(removed.end(), order_, place);
}

void ListingCache::Insert(const Node& directory, std::shared_ptr<const Listing> listing) {
  Order removed;  // destroyed after the lock
  const uint64_t bytes = listing->Bytes();
  MutexLock lock(mutex_);
  const auto key = static_cast<uint64_t>(directory.inode);
  const auto found = places_.find(key);
  if (found != places_.end()) Remove(found->second, removed);
  bytes_ += bytes;
  order_.push_front(Kept{key, bytes, std::move(listing)});
  places_[key] = order_.begin();
  // One that is larger than all that may be kept stays, alone, while it is read:
  // making it anew for each reply would take far longer than that.
  while (bytes_ > max_bytes_ && order_.size() > 1) Remove(std::prev(order_.end()), removed);
}

bool ListingCache::Finished(const Node& directory) {
  Order removed;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto found = places_.find(static_cast<uint64_t>(directory.inode));
  if (found == places_.end() || found->second->bytes <= max_bytes_ / kSmallParts) return false;
  Remove(found->second, removed);
  return true;
}

void ListingCache::DropStep(const StepEntry* step) {
  Order removed;  // destroyed after the lock
  MutexLock lock(mutex_);
  for (auto place = order_.begin(); place != order_.end();) {
    const auto next = std::next(place);
    if (place->listing->step.get() == step) Remove(place, removed);
    place = next;
  }
}

uint64_t ListingCache::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace ckptfs
