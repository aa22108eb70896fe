// SPDX-License-Identifier: Apache-2.0

#include "mount/mirror/mirror_nodes.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {

std::string PathOfPlace(int fd) { return StrCat("/proc/self/fd/", fd); }

namespace {

using Key = MirrorNodes::Key;

Errno<Key> KeyOf(int place, struct stat& status) {
  struct statx found {};
  constexpr unsigned kWanted = STATX_BASIC_STATS | STATX_BTIME;
  if (::statx(place, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, kWanted, &found) != 0 ||
      ::fstatat(place, "", &status, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0) {
    return FailErrno(errno);
  }
  const bool born = (found.stx_mask & STATX_BTIME) != 0;
  return Key{status.st_dev, status.st_ino,
             born ? found.stx_btime.tv_sec * 1'000'000'000 + found.stx_btime.tv_nsec : 0,
             status.st_mode & S_IFMT};
}

}  // namespace

// Names come from the kernel one by one, but nothing is taken on trust: "..", and what a link or a
// mount leads to, would be another tree.
Errno<MirrorNodes::Found> MirrorNodes::Look(int directory, const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
    return FailErrno(EINVAL);
  }
  open_how how{};
  how.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV;
  Descriptor place(
      static_cast<int>(::syscall(SYS_openat2, directory, name.c_str(), &how, sizeof how)));
  if (!place.valid()) return FailErrno(errno);
  Found found;
  MIRROR_ASSIGN_OR_RETURN(found.key, KeyOf(place.get(), found.status));
  found.place = std::make_shared<const Descriptor>(std::move(place));
  return found;
}

Errno<std::unique_ptr<MirrorNodes>> MirrorNodes::Create(Descriptor root, size_t descriptors) {
  struct stat status {};
  MIRROR_ASSIGN_OR_RETURN(const Key key, KeyOf(root.get(), status));
  std::unique_ptr<MirrorNodes> nodes(new MirrorNodes(descriptors));
  const auto node = std::make_shared<Node>(kMirrorRoot, key);
  const MutexLock lock(nodes->mutex_);
  node->kept = std::make_shared<const Descriptor>(std::move(root));
  node->lookups = 1;
  nodes->nodes_[kMirrorRoot] = node;
  nodes->by_key_[key] = node;
  return nodes;
}

Errno<MirrorNodes::NodePtr> MirrorNodes::Find(MirrorId id) {
  const MutexLock lock(mutex_);
  const auto found = nodes_.find(id);
  if (found == nodes_.end()) return FailErrno(ESTALE);
  return found->second;
}

Errno<PlacePtr> MirrorNodes::PlaceOf(const NodePtr& node) {
  NodePtr parent;
  std::string name;
  {
    const MutexLock lock(mutex_);
    if (node->kept) return node->kept;
    parent = node->parent;
    name = node->name;
  }
  if (const auto kept = places_.Find(node->id); kept && *kept) return *kept;
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr above, PlaceOf(parent));
  const auto found = Look(above->get(), name);
  // Somebody changed the directory itself: the kernel is to look the name up again.
  if (!found) return FailErrno(found.error() == ENOENT ? ESTALE : found.error());
  if (found->key != node->key) return FailErrno(ESTALE);
  places_.Replace(node->id, found->place);
  return found->place;
}

Errno<PlacePtr> MirrorNodes::PlaceOf(MirrorId id) {
  MIRROR_ASSIGN_OR_RETURN(const NodePtr node, Find(id));
  return PlaceOf(node);
}

MirrorNodes::NodePtr MirrorNodes::Known(const Key& key) {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

Errno<MirrorEntry> MirrorNodes::Lookup(const NodePtr& parent, const std::string& name) {
  MIRROR_ASSIGN_OR_RETURN(const PlacePtr above, PlaceOf(parent));
  MIRROR_ASSIGN_OR_RETURN(Found found, Look(above->get(), name));
  NodePtr node;
  PlacePtr dropped;
  {
    const MutexLock lock(mutex_);
    node = Known(found.key);
    if (!node) {
      node = std::make_shared<Node>(next_++, found.key);
      nodes_[node->id] = node;
      by_key_[found.key] = node;
    }
    ++node->lookups;
    if (node->id != kMirrorRoot) {
      node->parent = parent;
      node->name = name;
      dropped = std::exchange(node->kept, nullptr);
    }
  }
  places_.Replace(node->id, std::move(found.place));
  return MirrorEntry{node->id, found.status};
}

void MirrorNodes::Forget(MirrorId id, uint64_t count) {
  NodePtr gone;  // its parents may go with it, outside the lock
  {
    const MutexLock lock(mutex_);
    const auto found = nodes_.find(id);
    if (found == nodes_.end() || id == kMirrorRoot) return;
    Node& node = *found->second;
    node.lookups -= std::min(node.lookups, count);
    if (node.lookups > 0) return;
    gone = found->second;
    by_key_.erase(node.key);
    nodes_.erase(found);
  }
  // A descriptor that stays open would keep the blocks of a file that was removed.
  if (places_.Find(id)) places_.Replace(id, nullptr);
}

size_t MirrorNodes::size() const {
  const MutexLock lock(mutex_);
  return nodes_.size();
}

MirrorNodes::Held::Held(MirrorNodes& nodes, const NodePtr& parent, const std::string& name)
    : nodes_(nodes) {
  const auto above = nodes.PlaceOf(parent);
  if (!above) return;
  auto found = Look((*above)->get(), name);
  if (!found) return;
  const MutexLock lock(nodes.mutex_);
  node_ = nodes.Known(found->key);
  if (!node_ || node_->kept) return;
  node_->kept = std::move(found->place);
  first_ = true;
}

void MirrorNodes::Held::Moved(const NodePtr& parent, const std::string& name) {
  if (!node_) return;
  const MutexLock lock(nodes_.mutex_);
  node_->parent = parent;
  node_->name = name;
}

MirrorNodes::Held::~Held() {
  PlacePtr dropped;
  if (!node_ || !first_ || gone_) return;
  const MutexLock lock(nodes_.mutex_);
  dropped = std::exchange(node_->kept, nullptr);
}

}  // namespace ckptfs
