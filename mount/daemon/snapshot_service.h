// SPDX-License-Identifier: Apache-2.0
//
// SnapshotService is a daemon's whole business with snapshots: the receiver, the parts that
// make received steps durable and keep the newest in memory, and the retention of old ones.
// One of a store's daemons on a machine receives; another one's service waits, and takes
// over when that has gone.  Daemons of several machines make steps together.
//
// Thread safety: StartReceiving by one thread; status by any.
// Lifetime: store, catalogue and what the hooks use must outlive it.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "core/store/step_catalogue.h"
#include "mount/daemon/hot_steps.h"
#include "mount/daemon/peer_service.h"
#include "mount/daemon/snapshot_keeper.h"
#include "mount/daemon/snapshot_status.h"
#include "mount/daemon/step_collector.h"
#include "snapshot/landing/landing.h"
#include "snapshot/receive/receiver.h"

namespace ckptfs {

struct SnapshotRequest {
  std::string store;  // absolute
  std::optional<uint64_t>
      memory_bytes;                     // of arenas; absent: a quarter of RAM; 0: none are received
  Retention retention;                  // of the runs whose snapshots are received
  uint64_t hot_steps = 0;               // HotSteps
  std::optional<uint64_t> hot_bytes;    // absent: an eighth of RAM
  std::string spool;                    // absolute; empty: none
  std::optional<uint64_t> spool_bytes;  // absent: half of what is free there
  PeerRequest peers;
};

class SnapshotService {
 public:
  struct Hooks {
    // A step came, moved into the store, or went.
    std::function<Status(const StepRecord&)> refresh;
    std::function<void(const StepRecord&)> let_go;  // as CollectRequest's; may be empty
  };
  SnapshotService(Store& store, StepCatalogue& catalogue, SnapshotRequest request, Hooks hooks);
  ~SnapshotService();

  // From now on, unless it does already, no snapshots are wanted, or another daemon does.
  // kPermission, kInvalid if the spool cannot be one of this store; an error of its kind if
  // daemons cannot be reached at the peer's address; what else hinders it is logged.
  Status StartReceiving();
  // The policy from now on.  Any thread.
  void SetRetention(const Retention& retention);
  bool receiving() const { return Get() != nullptr; }
  // Copies of what a service manager keeps for us of saves.  REQUIRES: the thread that calls
  // StartReceiving.
  std::vector<DescriptorStore::Kept> KeptArenas() const;
  // Nothing where none are received.
  std::optional<SnapshotStatus> status() const;

 private:
  std::shared_ptr<const Receiver> Get() const;
  Retention retention() const;
  // The daemon that receives has peers, too.
  Status StartPeers();
  // False if the spool is another daemon's.
  Result<bool> OpenSpool();
  std::unique_ptr<Landing> MakeLanding();
  void KeepHot(const StepRecord& record);
  // Takes the outcome of a save.
  void Hear(const StepMaker::News& news);

  Store& store_;
  StepCatalogue& catalogue_;
  const SnapshotRequest request_;  // but for its retention
  const uint64_t memory_bytes_;
  const Hooks hooks_;
  HotSteps hot_;
  std::shared_ptr<ArenaShelf> shelf_;  // null: nobody keeps arenas for us
  std::unique_ptr<Spooler> spooler_;   // null: there is none
  std::unique_ptr<SnapshotKeeper> keeper_;
  std::unique_ptr<StepCollector> collector_;
  std::unique_ptr<WorldCommit> commit_;
  std::unique_ptr<Landing> landing_;
  std::unique_ptr<PeerService> peers_;              // null: there are none
  std::atomic<PeerService*> peers_ready_{nullptr};  // the same, once it serves
  mutable Mutex mutex_;
  std::shared_ptr<const Receiver> receiver_ GUARDED_BY(mutex_);
  Retention retention_ GUARDED_BY(mutex_);
};

// The service's status; null where no snapshots are received.
nlohmann::json SnapshotsJson(const SnapshotService& service);

}  // namespace ckptfs
