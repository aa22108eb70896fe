// SPDX-License-Identifier: Apache-2.0
//
// Namespace is what names there are, what lies behind them and who may see it:
// the current tree, which follows the step catalogue, and the nodes and listings
// that were made of it.
//
// Thread safety: all methods may be called concurrently; no lock is held across
// I/O, and no two of its locks at once.
// Lifetime: catalogue, formats and options must outlive it.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/store/step_catalogue.h"
#include "fs/invalidator.h"
#include "fs/permissions.h"
#include "fs/tree/listing_cache.h"
#include "fs/tree/node.h"
#include "fs/tree/resolver.h"
#include "fs/tree/tree.h"
#include "fs/types.h"

namespace ckptfs {

// Offsets of listings begin after those of "." and "..".
inline constexpr uint64_t kParentCookie = 2;

class Namespace {
 public:
  Namespace(StepCatalogue& catalogue, ViewFormats formats, const FilesystemOptions& options);

  std::shared_ptr<const TreeSnapshot> Snapshot() const;
  // The node of an inode the kernel knows.
  // BLOCKS: on loading a manifest, as the next four.
  Result<NodePtr> FindNode(InodeNumber inode);
  Result<NodePtr> FindChild(const TreeSnapshot& now, const Node& parent, std::string_view name);
  Result<std::shared_ptr<const Listing>> ListingOf(const TreeSnapshot& now, const Node& directory);
  // The node that a path of the mount leads to.
  Result<NodePtr> Walk(const TreeSnapshot& now, std::string_view path);
  Attributes AttributesOf(const Node& node);
  // The kernel knows the node from now on; where it knows too many, it is asked to
  // forget another one.
  NodePtr Reference(NodePtr node);
  // True if the caller may see what a name leads to.
  bool Visible(const TreeSnapshot& now, const Node& node, const Caller& caller);
  bool MayEnter(StepEntry& step, const Caller& caller);
  // The entries of a directory after `offset`, each with the offset to go on after it.
  struct Place {
    const NodePtr* node = nullptr;  // in the listing
    uint64_t offset = 0;
  };
  static std::vector<Place> EntriesAfter(const Node& directory, const Listing& listing,
                                         uint64_t offset, size_t limit);

  // Told of each step that went, or whose bytes lie elsewhere now, before the
  // kernel is.
  using StepGone = std::function<void(const TreeChange&)>;
  // Makes the tree one with what the catalogue has news of, and waits until the
  // kernel has been told.
  Status TakeInNews(const StepGone& gone);
  // The step that /view shows; its id is "latest" while it follows.
  std::optional<ShownStep> Shown() const;
  // The step that /view showed before; null if there was none.
  Result<std::shared_ptr<StepEntry>> SwitchView(std::string_view run, std::string_view id);
  // Unloads a step that is only kept for the next caller.
  void LetGo(const Digest& manifest) { recent_.Drop(manifest); }
  void EndInvalidation() { invalidator_.End(); }

  NodeTable& nodes() { return nodes_; }
  const NodeTable& nodes() const { return nodes_; }
  ListingCache& listings() { return listings_; }
  const ListingCache& listings() const { return listings_; }
  const Resolver& resolver() const { return resolver_; }
  const RecentSteps& recent() const { return recent_; }

 private:
  // The node of a name that the kernel knows from the process that served it before.
  Result<NodePtr> FindAgain(InodeNumber inode, const std::string& path);
  // The step that /view shows is not to be collected.
  void PinView();
  std::shared_ptr<const StepAccess> AccessOf(StepEntry& step);  // null: it cannot be loaded
  // Make the tree one with these news, which are of the generation after `seen`;
  // false if it is of another one by now.
  bool Apply(const StepNews& news, uint64_t seen, const StepGone& gone);
  void Announce(const std::vector<TreeChange>& changes, bool view_moved, const StepGone& gone);

  StepCatalogue& catalogue_;
  const ViewFormats formats_;
  const FilesystemOptions& options_;
  RecentSteps recent_;
  GroupCache groups_;
  const Resolver resolver_;
  NodeTable nodes_;
  ListingCache listings_;

  mutable Mutex snapshot_mutex_;
  std::shared_ptr<const TreeSnapshot> snapshot_ GUARDED_BY(snapshot_mutex_);
  ViewTarget view_target_ GUARDED_BY(snapshot_mutex_);
  uint64_t generation_ GUARDED_BY(snapshot_mutex_) = 0;  // of the catalogue's news; 0: none yet
  std::optional<Digest> pinned_ GUARDED_BY(snapshot_mutex_);  // the manifest that `pin_` is of
  std::shared_ptr<const void> pin_ GUARDED_BY(snapshot_mutex_);

  Invalidator invalidator_;  // last: its thread stops first
};

}  // namespace ckptfs
