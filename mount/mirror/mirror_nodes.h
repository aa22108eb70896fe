// SPDX-License-Identifier: Apache-2.0
//
// MirrorNodes knows the inodes of a directory's tree that the kernel may ask for by number, and
// leads to each by a descriptor, never by a path: a name is opened in its parent's descriptor,
// follows no link and enters no other mount.
//
// A number of descriptors is kept.  One that was let go is opened again by the parent's and the
// name, and has to be the same inode (device, number, time of birth); else the answer is ESTALE and
// the kernel looks the name up again.  An inode that loses its name through the mirror (unlink,
// rename over it) could not be found again, so its descriptor is kept until the kernel forgets it.
//
// Thread safety: all methods may be called concurrently.  The lock is not held over system calls.
// Lifetime: nodes are shared; a node holds its parent.

#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/base/lru.h"
#include "core/base/mutex.h"
#include "mount/mirror/mirror_types.h"

namespace ckptfs {

class MirrorNodes {
 public:
  struct Key {
    uint64_t device = 0;
    uint64_t inode = 0;
    int64_t birth_ns = 0;  // 0 where the filesystem does not tell
    uint32_t type = 0;     // S_IFMT of the mode
    auto operator<=>(const Key&) const = default;
  };

  struct Node {
    Node(MirrorId number, const Key& of) : id(number), key(of) {}
    const MirrorId id;
    const Key key;
    std::atomic<uint64_t> streamed{0};  // open files without passthrough

    // The rest is guarded by MirrorNodes::mutex_.
    uint64_t lookups = 0;
    std::shared_ptr<Node> parent;  // null: the root
    std::string name;              // in its parent, as it was found last
    PlacePtr kept;                 // not null: the name does not lead here any more
  };
  using NodePtr = std::shared_ptr<Node>;

  // A name as a look finds it; nothing is counted.
  struct Found {
    PlacePtr place;
    Key key;
    struct stat status {};
  };

  // `root`: a descriptor of the directory.  `descriptors`: how many are kept at a time.
  static Errno<std::unique_ptr<MirrorNodes>> Create(Descriptor root, size_t descriptors);

  // ESTALE if the kernel was never told of it, or has forgotten it.
  Errno<NodePtr> Find(MirrorId id);
  // A way to the inode.
  Errno<PlacePtr> PlaceOf(const NodePtr& node);
  Errno<PlacePtr> PlaceOf(MirrorId id);

  // Looks up a name and counts a reference, which Forget gives back.
  Errno<MirrorEntry> Lookup(const NodePtr& parent, const std::string& name);
  void Forget(MirrorId id, uint64_t count);

  // For changes of names: between Hold and its end the inode behind the name keeps its descriptor.
  class Held {
   public:
    Held(MirrorNodes& nodes, const NodePtr& parent, const std::string& name);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    // The name is gone: the descriptor stays.
    void Gone() { gone_ = true; }
    // Both names lead to one inode that the kernel knows.
    bool Is(const Held& other) const { return node_ && node_ == other.node_; }
    // The name is another one now.
    void Moved(const NodePtr& parent, const std::string& name);

   private:
    MirrorNodes& nodes_;
    NodePtr node_;  // null: nobody was told of it
    bool first_ = false;
    bool gone_ = false;
  };

  // Where a name of a directory leads, without following it.
  static Errno<Found> Look(int directory, const std::string& name);
  // How many inodes the kernel may ask for.
  size_t size() const;

 private:
  explicit MirrorNodes(size_t descriptors) : places_(descriptors) {}
  NodePtr Known(const Key& key) EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  MirrorId next_ GUARDED_BY(mutex_) = kMirrorStatus + 1;
  std::unordered_map<MirrorId, NodePtr> nodes_ GUARDED_BY(mutex_);
  std::map<Key, NodePtr> by_key_ GUARDED_BY(mutex_);
  Lru<MirrorId, PlacePtr> places_;  // null: the inode was forgotten
};

}  // namespace ckptfs
