// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/node.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "fs/tree/names.h"

namespace ckptfs {
namespace {

// The same path of the same manifest; steps removed and adopted again are equal.
bool SamePlace(const Node& a, const Node& b) {
  if (a.path != b.path || a.type != b.type || a.size != b.size || a.target != b.target) {
    return false;
  }
  if (!a.step || !b.step) return !a.step && !b.step;
  return a.step->record().manifest == b.step->record().manifest;
}

// As many as somebody has the patience to name.
bool Unbounded(const Node& node) {
  return node.kind == NodeKind::kLayoutLink || node.kind == NodeKind::kLayout ||
         node.kind == NodeKind::kLayoutInfo || node.kind == NodeKind::kViewEntry;
}

}  // namespace

const NodeTable::Shard& NodeTable::ShardOf(InodeNumber inode) const {
  return shards_[static_cast<uint64_t>(inode) % kShards];
}

tl::unexpected<Error> NoSuch(const Node& parent, std::string_view name) {
  return Fail(ErrorCode::kNotFound, StrCat(parent.path, "/", name, ": no such name"));
}

void NodeTable::Append(Shard& shard, Known& known) {
  known.place = ++shard.last_place;
  shard.order.emplace_back(known.place, static_cast<uint64_t>(known.node->inode));
  if (shard.order.size() < 2 * shard.nodes.size() + 64) return;
  // Mostly of nodes that went.
  std::erase_if(shard.order, [&](const auto& entry) {
    const auto found = shard.nodes.find(entry.second);
    return found == shard.nodes.end() || found->second.place != entry.first;
  });
}

// Asked for again only when all others have been.
NodePtr NodeTable::TakeOldest(Shard& shard) {
  while (!shard.order.empty()) {
    const auto [place, inode] = shard.order.front();
    shard.order.pop_front();
    const auto found = shard.nodes.find(inode);
    if (found == shard.nodes.end() || found->second.place != place) continue;
    Append(shard, found->second);
    return found->second.node;
  }
  return nullptr;
}

NodePtr NodeTable::Reference(NodePtr node, NodePtr* surplus) {
  for (uint64_t attempt = 1;; ++attempt) {
    NodePtr replaced;  // destroyed after the lock
    auto& shard = const_cast<Shard&>(ShardOf(node->inode));
    MutexLock lock(shard.mutex);
    Known& known = shard.nodes[static_cast<uint64_t>(node->inode)];
    if (known.node ? SamePlace(*known.node, *node)
                   : known.path.empty() || known.path == node->path) {
      const bool fresh = known.references == 0;
      ++known.references;
      known.path.clear();
      // The newer node wins: its step entry is the one that is mounted now.
      replaced = std::exchange(known.node, std::move(node));
      NodePtr held = known.node;
      if (!fresh || !Unbounded(*held)) return held;
      if (surplus != nullptr && shard.nodes.size() > shard_limit_) *surplus = TakeOldest(shard);
      Append(shard, known);
      return held;
    }
    Node moved = *node;
    moved.inode = InodeOf(node->step ? node->step->inode_seed() : 0, node->path, attempt);
    node = std::make_shared<const Node>(std::move(moved));
  }
}

void NodeTable::Forget(InodeNumber inode, uint64_t count) {
  NodePtr gone;  // destroyed after the lock
  auto& shard = const_cast<Shard&>(ShardOf(inode));
  MutexLock lock(shard.mutex);
  const auto found = shard.nodes.find(static_cast<uint64_t>(inode));
  if (found == shard.nodes.end()) return;
  Known& known = found->second;
  known.references -= std::min(known.references, count);
  if (known.references > 0) return;
  gone = std::move(known.node);
  shard.nodes.erase(found);
}

NodePtr NodeTable::Find(InodeNumber inode) const {
  const Shard& shard = ShardOf(inode);
  MutexLock lock(shard.mutex);
  const auto found = shard.nodes.find(static_cast<uint64_t>(inode));
  return found == shard.nodes.end() ? nullptr : found->second.node;
}

std::vector<KnownName> NodeTable::All() const {
  std::vector<KnownName> all;
  for (const Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    for (const auto& [inode, known] : shard.nodes) {
      all.push_back(
          {InodeNumber{inode}, known.references, known.node ? known.node->path : known.path});
    }
  }
  return all;
}

void NodeTable::Restore(KnownName name) {
  auto& shard = const_cast<Shard&>(ShardOf(name.inode));
  MutexLock lock(shard.mutex);
  Known& known = shard.nodes[static_cast<uint64_t>(name.inode)];
  known.path = std::move(name.path);
  known.references += name.references;
}

std::optional<std::string> NodeTable::PathWithoutNode(InodeNumber inode) const {
  const Shard& shard = ShardOf(inode);
  MutexLock lock(shard.mutex);
  const auto found = shard.nodes.find(static_cast<uint64_t>(inode));
  if (found == shard.nodes.end() || found->second.node) return std::nullopt;
  return found->second.path;
}

void NodeTable::Settle(NodePtr node) {
  auto& shard = const_cast<Shard&>(ShardOf(node->inode));
  MutexLock lock(shard.mutex);
  const auto found = shard.nodes.find(static_cast<uint64_t>(node->inode));
  if (found == shard.nodes.end() || found->second.node) return;
  Known& known = found->second;
  known.path.clear();
  known.node = std::move(node);
  if (Unbounded(*known.node)) Append(shard, known);
}

size_t NodeTable::size() const {
  size_t total = 0;
  for (const Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    total += shard.nodes.size();
  }
  return total;
}

}  // namespace ckptfs
