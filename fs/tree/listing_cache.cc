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
  const auto kept = kept_.Find(directory.inode);
  return kept && (*kept)->step == directory.step ? *kept : nullptr;
}

bool ListingCache::Finished(const Node& directory) {
  const auto kept = kept_.Find(directory.inode);
  if (!kept || (*kept)->Bytes() <= kept_.limit() / kSmallParts) return false;
  const auto it = [&](InodeNumber inode, const auto&) { return inode == directory.inode; };
  return kept_.DropIf(it) != 0;
}

void ListingCache::DropStep(const StepEntry* step) {
  kept_.DropIf([step](InodeNumber, const auto& listing) { return listing->step.get() == step; });
}

}  // namespace ckptfs
