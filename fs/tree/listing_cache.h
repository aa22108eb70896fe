// SPDX-License-Identifier: Apache-2.0
//
// ListingCache keeps the children of directories that never change, so that a
// walk over a thousand ranks asks a format once per directory.  Anybody who may list
// may make us keep listings, so the cache's memory is bounded, and a large listing
// is let go as soon as it has been read to its end.
//
// Thread safety: internally synchronised.
// Units: bytes of memory, as good as they can be told.

#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/lru.h"
#include "fs/tree/node.h"

namespace ckptfs {

struct Listing {
  std::shared_ptr<const StepEntry> step;  // the step that has these names
  std::vector<NodePtr> children;          // sorted by name

  // Null if there is no such child.
  NodePtr Find(std::string_view name) const;
  uint64_t Bytes() const;
};

class ListingCache {
 public:
  // Listings of more than a `kSmallParts`-th of it are large.
  static constexpr uint64_t kSmallParts = 32;
  // One that is larger than all that may be kept stays, alone, while it is read:
  // making it anew for each reply would take far longer than that.
  explicit ListingCache(uint64_t max_bytes)
      : kept_(max_bytes, [](const ListingPtr& listing) { return listing->Bytes(); }) {}

  // Null unless the directory's listing is known and is of this very entry: a
  // step adopted again has the same inodes but is another place.
  std::shared_ptr<const Listing> Find(const Node& directory);
  void Insert(const Node& directory, std::shared_ptr<const Listing> listing) {
    kept_.Replace(directory.inode, std::move(listing));
  }
  // Somebody has read the directory to its end.  True if it was large and went.
  bool Finished(const Node& directory);
  void DropStep(const StepEntry* step);
  uint64_t bytes() const { return kept_.weight(); }

 private:
  using ListingPtr = std::shared_ptr<const Listing>;

  Lru<InodeNumber, ListingPtr> kept_;
};

}  // namespace ckptfs
