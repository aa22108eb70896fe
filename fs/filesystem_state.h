// SPDX-License-Identifier: Apache-2.0
//
// What a Filesystem is made of, for the sources that implement it: names
// (filesystem.cc), open files (filesystem_open.cc), what changes and what is
// told of it (filesystem_admin.cc).
//
// Thread safety: each part is internally synchronised; `snapshot` is replaced
// whole under `snapshot_mutex`, and no two of their locks are held at once.
// Lifetime: members are destroyed in reverse order: handles and plans before
// the materialiser and the steps they use.

#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "core/base/lru.h"
#include "core/base/mutex.h"
#include "fs/filesystem.h"
#include "fs/invalidator.h"
#include "fs/permissions.h"
#include "fs/serve/counters.h"
#include "fs/serve/handle_table.h"
#include "fs/serve/live_opens.h"
#include "fs/serve/materialiser.h"
#include "fs/serve/page_reserve.h"
#include "fs/serve/prepared_plan.h"
#include "fs/serve/serving.h"
#include "fs/tree/listing_cache.h"
#include "fs/tree/node.h"
#include "fs/tree/resolver.h"
#include "fs/tree/tree.h"

namespace ckptfs {

inline constexpr size_t kRecentSteps = 8;
inline constexpr uint64_t kListingBytes = uint64_t{32} << 20;
inline constexpr uint64_t kPlanCacheBytes = uint64_t{64} << 20;

struct Filesystem::State {
  State(StepCatalogue& the_catalogue, std::span<const std::unique_ptr<ViewFormat>> the_formats,
        FilesystemOptions the_options);

  // --- names (filesystem.cc) ---
  std::shared_ptr<const TreeSnapshot> Snapshot() const;
  // The node of an inode the kernel knows.
  Result<NodePtr> FindNode(InodeNumber inode) const;
  // True if the caller may see what a name leads to.
  bool Visible(const TreeSnapshot& now, const Node& node, const Caller& caller);
  std::shared_ptr<const StepAccess> AccessOf(StepEntry& step);  // null: it cannot be loaded
  bool MayEnter(StepEntry& step, const Caller& caller);
  Result<NodePtr> FindChild(const TreeSnapshot& now, const Node& parent, std::string_view name);
  Result<std::shared_ptr<const Listing>> ListingOf(const TreeSnapshot& now, const Node& directory);
  Attributes AttributesOf(const Node& node);

  // --- open files (filesystem_open.cc) ---
  Result<std::shared_ptr<const PreparedPlan>> Prepare(const Node& file);
  // Somebody looks at a file: it may be opened.
  void Expect(const Node& file);
  ServingChoice Choose(const Node& file, const PreparedPlan& plan, bool warming) const;
  Result<std::shared_ptr<const Backing>> MakeBacking(const Node& file, const PreparedPlan& plan,
                                                     std::string* reason);
  OpenFile Describe(FileHandle handle, const OpenHandle& open) const;
  Result<OpenFile> OpenStatus(const Node& file, const Caller& caller);
  Result<OpenFile> OpenIfAllowed(const Node& file, const Caller& caller);
  Result<OpenFile> OpenData(const Node& file);
  Status WarmBelow(const TreeSnapshot& now, const Node& node, WarmReport& report);

  // --- changes (filesystem_admin.cc) ---
  void Say(std::string_view line) const;
  void StartMaterialiser();
  // Make the tree one with these news, which are of the generation after `seen`;
  // false if it is of another one by now.
  bool Apply(const StepNews& news, uint64_t seen);
  Status TakeInNews();
  void Announce(const std::vector<TreeChange>& changes, bool view_moved);
  void Forget(StepEntry& step);
  void ForgetPlans(const Digest& manifest);
  std::string StatusText() const;

  StepCatalogue& catalogue;
  const std::span<const std::unique_ptr<ViewFormat>> formats;
  const FilesystemOptions options;
  std::atomic<bool> passthrough;

  RecentSteps recent{kRecentSteps};
  GroupCache groups;
  Resolver resolver;
  NodeTable nodes;
  ListingCache listings{kListingBytes};
  Counters counters;
  std::unique_ptr<Materialiser> materialiser;  // null: no pool
  std::unique_ptr<PageReserve> reserve;        // null with it
  Lru<InodeNumber, std::shared_ptr<const PreparedPlan>> plans{
      kPlanCacheBytes, [](const auto& plan) { return plan->MemoryBytes(); }};
  LiveOpens live;
  HandleTable handles;

  mutable Mutex snapshot_mutex;
  std::shared_ptr<const TreeSnapshot> snapshot GUARDED_BY(snapshot_mutex);
  ViewTarget view_target GUARDED_BY(snapshot_mutex);
  uint64_t generation GUARDED_BY(snapshot_mutex) = 0;  // of the catalogue's news; 0: none yet

  Invalidator invalidator;  // last: its thread stops first
};

}  // namespace ckptfs
