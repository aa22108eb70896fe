// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/namespace.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/io/root.h"
#include "fs/tree/names.h"

namespace ckptfs {
namespace {

using Type = ViewEntry::Type;
constexpr size_t kRecentSteps = 8;
constexpr uint64_t kMostAttempts = 16;  // to number a path whose number is taken
constexpr uint64_t kListingBytes = uint64_t{32} << 20;
// Names that come and go are told to the kernel when they go; a second is for
// what it is told too late.
constexpr uint32_t kNamesValidMs = 1000;

uint32_t TypeBits(Type type) {
  switch (type) {
    case Type::kFile: return S_IFREG;
    case Type::kDirectory: return S_IFDIR;
    case Type::kSymlink: return S_IFLNK;
  }
  return S_IFREG;
}

// A user who can read a directory can search it; a user can execute a file who could do so in the
// source, and can read it here.
uint32_t PermissionBits(const Node& node, uint32_t read_bits) {
  if (node.type == Type::kSymlink) return 0777;
  const uint32_t run_bits = node.type == Type::kDirectory ? 0111 : node.run_bits;
  return read_bits | (read_bits >> 2 & run_bits);
}

bool Immutable(const Node& node) {
  return node.step != nullptr && node.kind != NodeKind::kStep && node.kind != NodeKind::kViewLink;
}

}  // namespace

Namespace::Namespace(StepCatalogue& catalogue, ViewFormats formats,
                     const FilesystemOptions& options)
    : catalogue_(catalogue),
      formats_(formats),
      options_(options),
      recent_(kRecentSteps, RecentSteps::kBytes, options.touched),
      resolver_(options.layouts, options.log),
      nodes_(options.max_names),
      listings_(kListingBytes),
      view_target_(options.run, options.step, options.follow),
      invalidator_(options.invalidate) {}

std::shared_ptr<const TreeSnapshot> Namespace::Snapshot() const {
  MutexLock lock(snapshot_mutex_);
  return snapshot_;
}

Result<NodePtr> Namespace::FindNode(InodeNumber inode) {
  if (inode == kRootInode) return Resolver::Root(*Snapshot());
  NodePtr node = nodes_.Find(inode);
  if (node) return node;
  if (const auto path = nodes_.PathWithoutNode(inode)) return FindAgain(inode, *path);
  return Fail(ErrorCode::kStale, StrCat("inode ", static_cast<uint64_t>(inode), " is not known"));
}

Result<NodePtr> Namespace::Walk(const TreeSnapshot& now, std::string_view path) {
  NodePtr node = Resolver::Root(now);
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (end > begin) {
      CKPT_ASSIGN_OR_RETURN(node, FindChild(now, *node, path.substr(begin, end - begin)));
    }
    begin = end + 1;
  }
  return node;
}

Result<NodePtr> Namespace::FindAgain(InodeNumber inode, const std::string& path) {
  const auto gone = [&] {
    return Fail(ErrorCode::kStale,
                StrCat(path, ": it is not what it was when an earlier process served it"));
  };
  const auto found = Walk(*Snapshot(), path);
  if (!found) return found.error().code == ErrorCode::kNotFound ? gone() : found;
  NodePtr node = *found;
  // Where two paths have one number the second one got the next free one.
  const uint64_t seed = node->step ? node->step->inode_seed() : 0;
  for (uint64_t attempt = 1; node->inode != inode; ++attempt) {
    if (attempt == kMostAttempts) return gone();
    if (InodeOf(seed, path, attempt) != inode) continue;
    Node moved = *node;
    moved.inode = inode;
    node = std::make_shared<const Node>(std::move(moved));
  }
  nodes_.Settle(node);
  return node;
}

NodePtr Namespace::Reference(NodePtr node) {
  NodePtr surplus;
  NodePtr held = nodes_.Reference(std::move(node), &surplus);
  if (surplus) invalidator_.Offer(surplus->parent, surplus->path);
  return held;
}

std::shared_ptr<const StepAccess> Namespace::AccessOf(StepEntry& step) {
  const auto access = step.Access();
  if (!access) return nullptr;
  if ((*access)->TakeChange()) {
    // Modes that the kernel may have cached for ever: it drops all below.
    invalidator_.Add(InodeOf(0, ParentPath(step.path())), step.record().id);
  }
  return *access;
}

bool Namespace::MayEnter(StepEntry& step, const Caller& caller) {
  if (caller.uid == 0) return true;
  const auto access = AccessOf(step);
  return access && access->Allows(caller, groups_);
}

bool Namespace::Visible(const TreeSnapshot& now, const Node& node, const Caller& caller) {
  if (caller.uid == 0) return true;
  if (node.step) return MayEnter(*node.step, caller);
  if (node.kind != NodeKind::kRun) return true;
  const Tree::Run* const run = now.tree.FindRun(node.name());
  const auto may = [&](const std::string&, const auto& step) { return MayEnter(*step, caller); };
  return run != nullptr && (run->steps.Any(may) || run->memory.Any(may));
}

Attributes Namespace::AttributesOf(const Node& node) {
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
  attributes.mode = TypeBits(node.type) | PermissionBits(node, read_bits);
  return attributes;
}

Result<std::shared_ptr<const Listing>> Namespace::ListingOf(const TreeSnapshot& now,
                                                            const Node& directory) {
  const bool fixed = Resolver::Fixed(directory) && directory.step;
  if (fixed) {
    if (auto listing = listings_.Find(directory)) return listing;
  }
  auto listing = std::make_shared<Listing>();
  listing->step = directory.step;
  CKPT_ASSIGN_OR_RETURN(listing->children, resolver_.Children(now, directory));
  std::sort(listing->children.begin(), listing->children.end(),
            [](const NodePtr& a, const NodePtr& b) { return a->name() < b->name(); });
  if (fixed) listings_.Insert(directory, listing);
  return listing;
}

Result<NodePtr> Namespace::FindChild(const TreeSnapshot& now, const Node& parent,
                                     std::string_view name) {
  if (parent.type != Type::kDirectory || name.empty() || name == "." || name == "..") {
    return NoSuch(parent, name);
  }
  if (parent.step && parent.step->removed()) return NoSuch(parent, name);
  if (!Resolver::Fixed(parent) || !parent.step) return resolver_.Child(now, parent, name);
  // A known name needs no format: the listing has it, or the inode that the path would
  // have.
  if (const auto listing = listings_.Find(parent)) {
    if (NodePtr child = listing->Find(name)) return child;
    return NoSuch(parent, name);
  }
  const std::string path = StrCat(parent.path, "/", name);
  const NodePtr known = nodes_.Find(InodeOf(parent.step->inode_seed(), path));
  if (known && known->step == parent.step && known->path == path) return known;
  return resolver_.Child(now, parent, name);
}

bool Namespace::Apply(const StepNews& news, uint64_t seen, const StepGone& gone) {
  const MakeStepEntry make = [this](const StepRecord& record) {
    return std::make_shared<StepEntry>(catalogue_, record, options_.roots, formats_, recent_);
  };
  NextTree next;
  std::string reason;
  bool view_moved = false;
  {
    MutexLock lock(snapshot_mutex_);
    if (generation_ != seen) return false;
    generation_ = news.generation;
    next = TakeIn(snapshot_ ? snapshot_->tree : Tree{}, news, make);
    const auto before = view_target_.step();
    view_target_.Update(next.tree, &reason);
    view_moved = before != view_target_.step();
    snapshot_ = std::make_shared<const TreeSnapshot>(
        TreeSnapshot{std::move(next.tree), view_target_.step()});
  }
  if (!reason.empty()) options_.Say(StrCat("/view is absent: ", reason));
  if (seen != 0) Announce(next.changes, view_moved, gone);
  return true;
}

void Namespace::Announce(const std::vector<TreeChange>& changes, bool view_moved,
                         const StepGone& gone) {
  for (const TreeChange& change : changes) {
    if (change.kept) {  // the same names and inodes; open files go on
      change.kept->Reload();
      recent_.Drop(change.kept->record().manifest);
      gone(change);
      continue;
    }
    if (change.removed) {
      change.removed->MarkRemoved();
      listings_.DropStep(change.removed.get());
      recent_.Drop(change.removed->record().manifest);
      gone(change);
      options_.Say(StrCat(change.removed->path(), " was removed; its open files stay readable"));
    }
    const std::string run = StrCat("/run/", change.run);
    const std::string place(PlaceName(change.place));
    invalidator_.Add(InodeOf(0, StrCat(run, "/", place)), change.id);
    // The directory of steps in memory comes and goes with them.
    if (change.place == StepPlace::kMemory) invalidator_.Add(InodeOf(0, run), place);
    invalidator_.Add(InodeOf(0, "/run"), change.run);
  }
  if (view_moved) invalidator_.Add(kRootInode, "view");
  invalidator_.Drain();
}

void Namespace::PinView() {
  std::shared_ptr<StepEntry> view;
  {
    MutexLock lock(snapshot_mutex_);
    view = snapshot_->view;
    if (view && pinned_ == view->record().manifest && pin_) return;
  }
  auto pin = view ? catalogue_.Pin(view->record()) : nullptr;
  std::shared_ptr<const void> before;  // let go outside
  MutexLock lock(snapshot_mutex_);
  if (snapshot_->view != view) return;  // the call that moved it pins that
  before = std::exchange(pin_, std::move(pin));
  pinned_ = view ? std::optional(view->record().manifest) : std::nullopt;
}

Status Namespace::TakeInNews(const StepGone& gone) {
  for (;;) {
    uint64_t seen = 0;
    {
      MutexLock lock(snapshot_mutex_);
      seen = generation_;
    }
    CKPT_ASSIGN_OR_RETURN(const StepNews news, catalogue_.News(seen));
    const bool nothing = seen != 0 && !news.all && news.changes.empty();
    if (!nothing && !Apply(news, seen, gone)) continue;
    PinView();
    return {};
  }
}

// The entries of a fixed directory are numbered; those of one that changes are
// ordered by a cookie that stays theirs.
std::vector<Namespace::Place> Namespace::EntriesAfter(const Node& directory, const Listing& listing,
                                                      uint64_t offset, size_t limit) {
  std::vector<Place> entries;
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
            [](const Place& a, const Place& b) { return a.offset < b.offset; });
  return entries;
}

std::optional<ShownStep> Namespace::Shown() const {
  MutexLock lock(snapshot_mutex_);
  const auto& step = snapshot_->view;
  if (!step) return std::nullopt;
  return ShownStep{step->record().run, view_target_.follows() ? "latest" : step->record().id};
}

Result<std::shared_ptr<StepEntry>> Namespace::SwitchView(std::string_view run,
                                                         std::string_view id) {
  std::shared_ptr<StepEntry> before;
  {
    MutexLock lock(snapshot_mutex_);
    before = view_target_.step();
    CKPT_RETURN_IF_ERROR(view_target_.Switch(snapshot_->tree, run, id));
    if (before == view_target_.step()) return before;
    snapshot_ =
        std::make_shared<const TreeSnapshot>(TreeSnapshot{snapshot_->tree, view_target_.step()});
  }
  PinView();
  invalidator_.Add(kRootInode, "view");
  invalidator_.Drain();
  return before;
}

}  // namespace ckptfs
