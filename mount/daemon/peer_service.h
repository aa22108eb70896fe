// SPDX-License-Identifier: Apache-2.0
//
// PeerService is a daemon's whole business with other machines' memory: it listens for peers, keeps
// their parts and its own on a shelf, has its own protected (snapshot/landing/protector.h), and
// shows the newest step that daemons hold together at /run/<run>/memory/<step>.
//
// Thread safety: all methods may be called concurrently.  One thread of its own, which looks for
// peers and for what they hold.
// Lifetime: store, catalogue and what the options use must outlive it; a step that is open stays
// readable from other machines when it goes.
// Units: bytes; a rate is bytes a second.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/peer/peer_pool.h"
#include "core/peer/peer_root.h"
#include "core/peer/peer_server.h"
#include "core/peer/placement.h"
#include "core/peer/tcp_transport.h"
#include "core/records/node_presence.h"
#include "core/store/step_catalogue.h"
#include "snapshot/landing/protector.h"

namespace ckptfs {

// The command line's options of peers.
struct PeerRequest {
  std::string address;                   // where to listen; empty: there are no peers
  std::optional<uint64_t> memory_bytes;  // of the shelf; absent: a quarter of RAM
  ProtectScheme scheme;                  // of this daemon's ranks' parts
  std::string failure_domain;            // empty: the host
  uint64_t rate = 0;                     // 0: as fast as the links take it
};

struct PeerServiceStatus {
  PeerRecord self;
  uint64_t memory = 0;  // of the shelf
  uint64_t used = 0;
  uint64_t links = 0;
  uint64_t received_bytes = 0;
  uint64_t rate_limit = 0;
  PeerPoolStatus pool;
  std::optional<ProtectorStatus> protector;
  std::vector<std::string> shown;  // "run/memory/7"
};

class PeerService {
 public:
  struct Hooks {
    std::function<Status(const StepRecord&)> refresh;                         // a step came or went
    std::function<std::shared_ptr<const void>(const std::string& name)> say;  // a presence
    std::function<Result<std::vector<PreparedPart>>()> spooled;  // what lies in the spool
    std::chrono::milliseconds turn{2'000};  // between looks at what has changed
  };
  // `node`: of this daemon's presence.
  static Result<std::unique_ptr<PeerService>> Start(Store& store, StepCatalogue& catalogue,
                                                    const PeerRequest& request, const Digest& node,
                                                    Hooks hooks);
  ~PeerService();

  // Null: nothing is protected from here.
  Protector* protector() const { return protector_.get(); }
  PeerServiceStatus status() const;

 private:
  struct Shown {
    std::string directory;
    StepRecord record;
    std::shared_ptr<PeerRoot> root;
    // Directories of the store, said to collectors.  Not kept by the step: one that is open
    // outlives who says them.
    std::vector<std::shared_ptr<const void>> said;
  };
  PeerService(Store& store, StepCatalogue& catalogue, PeerRequest request, Hooks hooks);
  Status Begin(const Digest& node);
  Worker::Time Turn();
  void LookForPeers();
  // Returns what all nodes hold; shows the newest step of each run that can be shown, and no other.
  std::vector<MemoryAttempt> Look();
  void ShowRun(const std::string& run, const std::vector<MemoryAttempt>& attempts);
  Result<Shown> Show(const MemoryAttempt& attempt);
  // The step that is shown stays while it is whole and protected.
  void KeepOrHide(const std::string& run, const std::vector<MemoryAttempt>& attempts);
  std::string ShownDirectory(const std::string& run) const;
  void Hide(const std::string& run, const std::string& why);
  // Room for newer ones: of what is older than a step that is shown nobody has need.
  void ForgetOlder(const std::vector<MemoryAttempt>& attempts, const MemoryAttempt& shown);
  Result<std::vector<ShownMemoryStep>> Answer(const std::string& run);

  Store& store_;
  StepCatalogue& catalogue_;
  const PeerRequest request_;
  const Hooks hooks_;
  PeerRecord self_;
  const std::shared_ptr<TcpTransport> transport_;
  PeerShelf shelf_;
  std::shared_ptr<const void> presence_;
  std::shared_ptr<PeerPool> pool_;  // which steps that are open use longer than this
  Mutex peers_mutex_;               // one search for peers at a time
  std::vector<PeerRecord> found_ GUARDED_BY(peers_mutex_);
  Mutex look_mutex_;  // one look at a time
  mutable Mutex mutex_;
  std::map<std::string, Shown> shown_ GUARDED_BY(mutex_);       // by run
  std::map<std::string, std::string> said_ GUARDED_BY(mutex_);  // why a run's step is not shown
  bool changed_ GUARDED_BY(mutex_) = true;  // the shelf has, or nothing was looked at
  Worker::Time looked_;                     // the turns' own, as is the next
  Worker::Time searched_;
  std::unique_ptr<PeerServer> server_;
  std::unique_ptr<Protector> protector_;  // null: nothing is protected from here
  Worker worker_;
};

}  // namespace ckptfs
