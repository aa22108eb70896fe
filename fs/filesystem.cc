// SPDX-License-Identifier: Apache-2.0

#include "fs/filesystem.h"

#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "fs/filesystem_state.h"
#include "fs/tree/names.h"

namespace ckptfs {
namespace {

using Type = ViewEntry::Type;
constexpr uint64_t kSelfCookie = 1;
constexpr uint64_t kParentCookie = 2;
// Names that come and go are told to the kernel when they go; a second is for
// what it is told too late.
constexpr uint32_t kNamesValidMs = 1000;

Error NoSuch(std::string_view where, std::string_view name) {
  return Error{ErrorCode::kNotFound, StrCat(where, "/", name, ": no such name")};
}

uint32_t TypeBits(Type type) {
  switch (type) {
    case Type::kFile: return S_IFREG;
    case Type::kDirectory: return S_IFDIR;
    case Type::kSymlink: return S_IFLNK;
  }
  return S_IFREG;
}

// Directories can be searched by who can read.
uint32_t PermissionBits(Type type, uint32_t read_bits) {
  if (type == Type::kSymlink) return 0777;
  return type == Type::kDirectory ? read_bits | read_bits >> 2 : read_bits;
}

bool Immutable(const Node& node) {
  return node.step != nullptr && node.kind != NodeKind::kStep && node.kind != NodeKind::kViewLink;
}

// An entry of a listing and where to go on after it.
struct Cookied {
  const NodePtr* node = nullptr;  // in the listing
  uint64_t cookie = 0;
};

// The entries after `offset`.  Those of a fixed directory are numbered; those
// of one that changes are ordered by a cookie that stays theirs.
std::vector<Cookied> EntriesAfter(const Node& directory, const Listing& listing,
                                  uint64_t offset, size_t limit) {
  std::vector<Cookied> entries;
  if (Resolver::Fixed(directory)) {
    const uint64_t first = offset > kParentCookie ? offset - kParentCookie : 0;
    for (uint64_t i = first; i < listing.children.size() && entries.size() < limit; ++i) {
      entries.push_back({&listing.children[i], i + kParentCookie + 1});
    }
    return entries;
  }
  for (const NodePtr& child : listing.children) {
    const uint64_t cookie = CookieOf(child->name());
    if (cookie > offset) entries.push_back({&child, cookie});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Cookied& a, const Cookied& b) { return a.cookie < b.cookie; });
  return entries;
}

}  // namespace

Filesystem::State::State(StepCatalogue& the_catalogue,
                         std::span<const std::unique_ptr<ViewFormat>> the_formats,
                         FilesystemOptions the_options)
    : catalogue(the_catalogue),
      formats(the_formats),
      options(std::move(the_options)),
      passthrough(options.passthrough),
      resolver(options.layouts, options.log),
      view_target(options.run, options.step, options.follow),
      invalidator(options.invalidate) {}

std::shared_ptr<const TreeSnapshot> Filesystem::State::Snapshot() const {
  MutexLock lock(snapshot_mutex);
  return snapshot;
}

Result<NodePtr> Filesystem::State::FindNode(InodeNumber inode) const {
  if (inode == kRootInode) return Resolver::Root(*Snapshot());
  NodePtr node = nodes.Find(inode);
  if (node) return node;
  return Fail(ErrorCode::kStale, StrCat("inode ", static_cast<uint64_t>(inode), " is not known"));
}

std::shared_ptr<const StepAccess> Filesystem::State::AccessOf(StepEntry& step) {
  const auto access = step.Access();
  if (!access) return nullptr;
  if ((*access)->TakeChange()) {
    // Modes that the kernel may have cached for ever: it drops all below.
    invalidator.Add(InodeOf(0, StrCat("/run/", step.record().run, "/step")), step.record().id);
  }
  return *access;
}

bool Filesystem::State::MayEnter(StepEntry& step, const Caller& caller) {
  if (caller.uid == 0) return true;
  const auto access = AccessOf(step);
  return access && access->Allows(caller, groups);
}

bool Filesystem::State::Visible(const TreeSnapshot& now, const Node& node, const Caller& caller) {
  if (caller.uid == 0) return true;
  if (node.step) return MayEnter(*node.step, caller);
  if (node.kind != NodeKind::kRun) return true;
  const Tree::Run* const run = now.tree.FindRun(node.name());
  if (run == nullptr) return false;
  return std::any_of(run->steps.begin(), run->steps.end(),
                     [&](const auto& step) { return MayEnter(*step.second, caller); });
}

Attributes Filesystem::State::AttributesOf(const Node& node) {
  Attributes attributes;
  attributes.inode = node.inode;
  attributes.size = node.size;
  attributes.blocks = node.type == Type::kFile ? CeilDiv(node.size, 512) : 0;
  attributes.mtime_ns = node.mtime_ns;
  attributes.immutable = Immutable(node);
  attributes.valid_ms = kNamesValidMs;
  attributes.uid = geteuid();
  attributes.gid = getegid();
  uint32_t read_bits = node.kind == NodeKind::kStatus ? 0400 : 0444;
  if (node.step) {
    // A step that cannot be loaded is still a name, for root to look at.
    const auto access = AccessOf(*node.step);
    const auto rule = access ? access->rule() : std::make_shared<const AccessRule>();
    attributes.uid = rule->uid;
    attributes.gid = rule->gid;
    read_bits = rule->read_bits;
    // The kernel does not check who may read a link.
    const bool open_to_all = read_bits == 0444;
    if (!rule->exact || (node.kind == NodeKind::kViewLink && !open_to_all)) {
      attributes.valid_ms = 0;
    }
  }
  attributes.mode = TypeBits(node.type) | PermissionBits(node.type, read_bits);
  return attributes;
}

Result<std::shared_ptr<const Listing>> Filesystem::State::ListingOf(const TreeSnapshot& now,
                                                                    const Node& directory) {
  const bool fixed = Resolver::Fixed(directory) && directory.step;
  if (fixed) {
    if (auto listing = listings.Find(directory)) return listing;
  }
  auto listing = std::make_shared<Listing>();
  listing->step = directory.step;
  CKPT_ASSIGN_OR_RETURN(listing->children, resolver.Children(now, directory));
  std::sort(listing->children.begin(), listing->children.end(),
            [](const NodePtr& a, const NodePtr& b) { return a->name() < b->name(); });
  if (fixed) listings.Insert(directory, listing);
  return listing;
}

Result<NodePtr> Filesystem::State::FindChild(const TreeSnapshot& now, const Node& parent,
                                             std::string_view name) {
  if (parent.type != Type::kDirectory || name.empty() || name == "." || name == "..") {
    return Fail(NoSuch(parent.path, name));
  }
  if (parent.step && parent.step->removed()) return Fail(NoSuch(parent.path, name));
  if (!Resolver::Fixed(parent) || !parent.step) return resolver.Child(now, parent, name);
  // What is known needs no format: the listing, then the inode that the path
  // would have.
  if (const auto listing = listings.Find(parent)) {
    if (NodePtr child = listing->Find(name)) return child;
    return Fail(NoSuch(parent.path, name));
  }
  const std::string path = StrCat(parent.path, "/", name);
  const NodePtr known = nodes.Find(InodeOf(parent.step->inode_seed(), path));
  if (known && known->step == parent.step && known->path == path) return known;
  return resolver.Child(now, parent, name);
}

Filesystem::Filesystem(std::unique_ptr<State> state) : state_(std::move(state)) {}
Filesystem::~Filesystem() = default;

Result<std::unique_ptr<Filesystem>> Filesystem::Create(
    StepCatalogue& catalogue, std::span<const std::unique_ptr<ViewFormat>> formats,
    FilesystemOptions options) {
  std::unique_ptr<Filesystem> filesystem(
      new Filesystem(std::make_unique<State>(catalogue, formats, std::move(options))));
  filesystem->state_->StartMaterialiser();
  CKPT_RETURN_IF_ERROR(filesystem->Refresh());
  return filesystem;
}

Result<Attributes> Filesystem::Lookup(InodeNumber parent, std::string_view name,
                                      const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kLookup);
  const auto now = s.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const NodePtr directory, s.FindNode(parent));
  // Who may not see the step is told nothing of what is in it.
  if (!s.Visible(*now, *directory, caller)) return Fail(NoSuch(directory->path, name));
  Result<NodePtr> child = s.FindChild(*now, *directory, name);
  if (!child) {
    s.counters.CountError(child.error());
    return Fail(std::move(child).error());
  }
  if (!s.Visible(*now, **child, caller)) return Fail(NoSuch(directory->path, name));
  s.Expect(**child);
  return s.AttributesOf(*s.nodes.Reference(*std::move(child)));
}

Attributes Filesystem::Remember(const DirectoryEntry& entry) {
  State& s = *state_;
  s.Expect(*entry.node);
  Attributes attributes = entry.attributes;
  attributes.inode = s.nodes.Reference(entry.node)->inode;
  return attributes;
}

void Filesystem::Forget(InodeNumber inode, uint64_t count) {
  state_->counters.Count(Request::kForget);
  state_->nodes.Forget(inode, count);
}

Result<Attributes> Filesystem::GetAttributes(InodeNumber inode, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kAttributes);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.FindNode(inode));
  // Whoever has it open may ask, also when its step is gone.
  if (!s.live.Peek(inode) && !s.Visible(*s.Snapshot(), *node, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, ": not yours to see"));
  }
  return s.AttributesOf(*node);
}

Result<std::string> Filesystem::ReadLink(InodeNumber inode, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kReadLink);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.FindNode(inode));
  if (!s.Visible(*s.Snapshot(), *node, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, ": not yours to see"));
  }
  if (node->type != Type::kSymlink) {
    return Fail(ErrorCode::kInvalid, StrCat(node->path, " is not a symbolic link"));
  }
  return node->target;
}

Result<std::vector<DirectoryEntry>> Filesystem::ReadDirectory(InodeNumber inode, uint64_t offset,
                                                              size_t limit,
                                                              const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kReadDirectory);
  const auto now = s.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const NodePtr directory, s.FindNode(inode));
  if (directory->type != Type::kDirectory) {
    return Fail(ErrorCode::kInvalid, StrCat(directory->path, " is not a directory"));
  }
  if (!s.Visible(*now, *directory, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(directory->path, ": not yours to see"));
  }
  if (directory->step && directory->step->removed()) {
    return Fail(ErrorCode::kStale, StrCat(directory->path, ": the step was removed"));
  }
  auto listing = s.ListingOf(*now, *directory);
  if (!listing) {
    s.counters.CountError(listing.error());
    return Fail(std::move(listing).error());
  }
  std::vector<DirectoryEntry> entries;
  const auto add = [&](std::string_view name, Attributes attributes, uint64_t cookie,
                       NodePtr node = nullptr) {
    if (cookie <= offset || entries.size() >= limit) return;
    entries.push_back({std::string(name), attributes, cookie, std::move(node)});
  };
  if (offset < kParentCookie) {
    Attributes parent = s.AttributesOf(*directory);
    add(".", parent, kSelfCookie);
    parent.inode = directory->parent;
    add("..", parent, kParentCookie);
  }
  for (const Cookied& entry : EntriesAfter(*directory, **listing, offset, limit)) {
    if (entries.size() >= limit) break;
    const Node& node = **entry.node;
    if (!s.Visible(*now, node, caller)) continue;
    add(node.name(), s.AttributesOf(node), entry.cookie, *entry.node);
  }
  if (entries.empty() && s.listings.Finished(*directory)) {
    listing->reset();
    malloc_trim(0);  // many small blocks, which the allocator would keep
  }
  return entries;
}

}  // namespace ckptfs
