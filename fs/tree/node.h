// SPDX-License-Identifier: Apache-2.0
//
// Node is one name of the tree: what it is, where it is, and what attributes
// tell of it.  Nodes are values of their path: the same path of the same
// manifest always gives the same node with the same inode.
//
// Thread safety: Node is immutable; NodeTable is internally synchronised.
// Lifetime: a node keeps its step's entry, never the loaded step.
// Units: bytes.

#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "fs/handover.h"
#include "fs/tree/mounted_step.h"
#include "fs/types.h"

namespace ckptfs {

enum class NodeKind : uint8_t {
  kRoot,         // /
  kRuns,         // /run
  kRun,          // /run/<run>
  kSteps,        // /run/<run>/step
  kMemorySteps,  // /run/<run>/memory; there while a step is in it
  kStep,         // /run/<run>/step/<id>, /run/<run>/memory/<id>
  kViews,        // .../view
  kViewReadme,   // .../view/README.txt
  kLayoutIndex,  // .../view/layouts.json
  kLayoutLink,   // .../view/<other order of tokens>, a symlink
  kLayout,       // .../view/<layout>
  kLayoutInfo,   // .../view/<layout>/info.json
  kViewEntry,    // an entry that a format puts below it
  kParams,       // .../param
  kParam,        // .../param/<name>, a symlink for an alias
  kAtom,         // .../param/<name>/<kind>...
  kSourceDirectory,
  kSourceFile,
  kSourceText,
  kStepInfo,  // .../info.json
  kViewLink,  // /view
  kIngest,    // /ingest
  kControl,   // /.ckptfs
  kStatus,    // /.ckptfs/status
};

struct Node {
  NodeKind kind = NodeKind::kRoot;
  ViewEntry::Type type = ViewEntry::Type::kDirectory;
  InodeNumber inode{};
  InodeNumber parent{};
  std::string path;    // in the mount, "/run/r/step/s/param"; "" is the root
  std::string target;  // of a symlink
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  uint32_t run_bits = 0;  // of a source file: classes that may execute it if they may read it
  Reading reading = Reading::kRandom;  // of a file
  uint32_t index = 0;  // kAtom: AtomIndex; kSourceFile: BlobIndex; kSourceText: of texts
  std::shared_ptr<StepEntry> step;          // null above steps
  std::shared_ptr<const LayoutOffer> view;  // from kLayout down

  std::string_view name() const {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string_view(path)
                                      : std::string_view(path).substr(slash + 1);
  }
  // The path below the step, "view/tp2/rank0".  REQUIRES: step, below kStep.
  std::string_view StepPath() const {
    return std::string_view(path).substr(step->path().size() + 1);
  }
  // The path below view/<layout>/; "" for that directory.  REQUIRES: view.
  std::string_view ViewPath() const {
    const size_t begin = step->path().size() + 6 + view->name.size();  // "/view/" and the name
    return path.size() <= begin ? std::string_view() : std::string_view(path).substr(begin + 1);
  }
};

using NodePtr = std::shared_ptr<const Node>;

// kNotFound: also the answer to a user who may not see the name.
tl::unexpected<Error> NoSuch(const Node& parent, std::string_view name);

// The nodes the kernel knows, with how often it looked each up.  Nothing else is
// kept; but the kernel remembers names for as long as it has memory, and anybody may
// look up any layout's.  Beyond a number of nodes each new one has the kernel asked
// to forget the one below view/ that was referred to first.
class NodeTable {
 public:
  explicit NodeTable(size_t limit) : shard_limit_(limit / kShards) {}

  // Count one more reference.  Returns the node that holds the inode from now
  // on: `node`, or an equal one that was there.  If another path has the number
  // (a collision of hashes) the node gets the next free one.  `*surplus`: which one the
  // kernel is to forget, if any; it may be in use and stay.
  NodePtr Reference(NodePtr node, NodePtr* surplus = nullptr);
  void Forget(InodeNumber inode, uint64_t count);
  // Null if the kernel does not know it.
  NodePtr Find(InodeNumber inode) const;
  size_t size() const;

  // All names that the kernel knows, in no order.
  std::vector<KnownName> All() const;
  // The kernel knows the name from a process that served it before; its node is found when
  // somebody asks for it.
  void Restore(KnownName name);
  // The path of a restored name without a node; nothing for others.
  std::optional<std::string> PathWithoutNode(InodeNumber inode) const;
  // Gives a restored name its node, unless it has one or was forgotten meanwhile.
  void Settle(NodePtr node);

 private:
  static constexpr size_t kShards = 64;
  struct Known {
    NodePtr node;      // null: restored, and nobody has asked for it
    std::string path;  // where it is null
    uint64_t references = 0;
    uint64_t place = 0;  // in the order; 0: not in it
  };
  struct alignas(64) Shard {
    mutable Mutex mutex;
    std::unordered_map<uint64_t, Known> nodes GUARDED_BY(mutex);
    // (place, inode) of nodes below view/, as they came; of those that went, too.
    std::deque<std::pair<uint64_t, uint64_t>> order GUARDED_BY(mutex);
    uint64_t last_place GUARDED_BY(mutex) = 0;
  };
  const Shard& ShardOf(InodeNumber inode) const;
  static void Append(Shard& shard, Known& known) EXCLUSIVE_LOCKS_REQUIRED(shard.mutex);
  static NodePtr TakeOldest(Shard& shard) EXCLUSIVE_LOCKS_REQUIRED(shard.mutex);

  const size_t shard_limit_;
  std::array<Shard, kShards> shards_;
};

}  // namespace ckptfs
