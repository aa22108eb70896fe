// SPDX-License-Identifier: Apache-2.0
//
// ArenaShelf keeps arenas beyond the daemon's life, if a service manager does
// (descriptor_store.h): steps become durable though both trainer and daemon have died.  Beside
// each arena lies a ledger, a memory file that only daemons have.  It says what the rank has
// said of the attempts that it handed over whole; the next daemon hears it from there.
//
//   ledger = block | block                at 0 and kLedgerSlot; the valid one of the higher
//                                         generation counts, the other is written next
//   block  = magic (8) | generation (8) | bytes of the body (8) | digest of the body (16)
//            | body
//   body   = uid (4) | text: the store | text: a message *       (EncodeSnapshotMessage)
//   text   = bytes (4) | so many
//
// The first message is the `return` that the rank would say.  A ledger is believed no more
// than a client: what it says is said over a socket.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the shelf outlives its places.
// Units: bytes; numbers are of this machine's order.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "snapshot/receive/descriptor_store.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {

inline constexpr uint64_t kLedgerSlot = uint64_t{1} << 30;

class ArenaShelf;

// The place of one arena; when it is let go of, the manager forgets both files.
class ShelfPlace {
 public:
  ~ShelfPlace();
  // Notes that an attempt was handed over with these messages, from `begin` to `end`.
  void Add(uint64_t attempt, std::vector<SnapshotMessage> said);
  // Notes that an attempt is durable or dropped.
  void Remove(uint64_t attempt);

 private:
  friend class ArenaShelf;
  ShelfPlace(std::shared_ptr<ArenaShelf> shelf, std::string id, Descriptor ledger);
  void Write() EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<ArenaShelf> shelf_;
  const std::string id_;
  const Descriptor ledger_;
  Mutex mutex_;
  SnapshotMessage greeting_ GUARDED_BY(mutex_);
  std::map<uint64_t, std::vector<SnapshotMessage>> said_ GUARDED_BY(mutex_);
  uint64_t generation_ GUARDED_BY(mutex_) = 0;
};

class ArenaShelf : public std::enable_shared_from_this<ArenaShelf> {
 public:
  // Returns the shelf of the environment, with what lies on it; null where
  // there is none.  `store`: absolute; arenas of another store are let go of.
  static std::shared_ptr<ArenaShelf> FromEnvironment(std::string store);
  // Makes a shelf with what `manager` kept.
  static std::shared_ptr<ArenaShelf> Open(std::unique_ptr<const DescriptorStore> manager,
                                          std::vector<DescriptorStore::Kept> kept,
                                          std::string store);

  // Puts an arena there, or takes the place that it has.  Null if it cannot be kept.
  std::shared_ptr<ShelfPlace> Place(int arena, const SnapshotMessage& greeting);
  // Tells the daemon of the store, as ranks would, what lies here since an earlier one.
  // BLOCKS: on its answers.
  void HandOver(const std::function<void(std::string_view line)>& log);
  // Copies of what lies here, for a program that takes this one's place in the same process.
  std::vector<DescriptorStore::Kept> All() const { return manager_->All(); }
  // Called when this process ends: what is let go of from now on stays, until Thaw if that comes.
  void Freeze();
  void Thaw();

 private:
  friend class ShelfPlace;
  struct Left {
    std::string id;
    Descriptor arena;
    Descriptor ledger;
    uint64_t generation = 0;
    std::vector<SnapshotMessage> said;
  };
  ArenaShelf(std::unique_ptr<const DescriptorStore> manager, std::string store);
  void Sort(std::vector<DescriptorStore::Kept> kept);
  Status Say(const Left& left) const;
  bool frozen() const;
  void LetGo(const std::string& id);
  void Forget(const std::string& id) const;

  const std::unique_ptr<const DescriptorStore> manager_;
  const std::string store_;
  mutable Mutex mutex_;
  bool frozen_ GUARDED_BY(mutex_) = false;
  std::vector<std::string> let_go_ GUARDED_BY(mutex_);          // while it was frozen
  std::vector<std::shared_ptr<Left>> left_ GUARDED_BY(mutex_);  // by an earlier daemon
};

}  // namespace ckptfs
