// SPDX-License-Identifier: Apache-2.0
//
// Protector gives what this daemon's ranks have saved to other daemons' memory.  It copies ended
// parts to the shelf first and lets their arenas go; a peer that is slow or away never holds an
// arena.  Then it sends them to the nodes that PlaceNodes() names, until as many hold them, or
// units of them, as the scheme says (core/peer/spread_file.h).
//
//   incoming ---copied---> ready ---sent---> flight ---whole, all protected---> kept
//                                                     kept ---not shown yet ---> older
//
// The mount goes on showing an older save while the one that is kept cannot be shown.
// One save of each run is in flight; the newest of those that come meanwhile is ready, the others
// are passed over.  A save in flight of which other nodes have passed over their part gives way.
//
// Thread safety: all methods may be called concurrently.  Two workers of its own: one copies, one
// sends.
// Lifetime: shelf, pool and what the options name must outlive it.
// Units: bytes; rate in bytes a second.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/peer_pool.h"
#include "core/peer/peer_shelf.h"
#include "core/peer/placement.h"
#include "core/peer/spread_file.h"
#include "snapshot/landing/received_step.h"

namespace ckptfs {

struct ProtectorOptions {
  ProtectScheme scheme;
  Digest node;
  std::string failure_domain;
  PeerShelf* shelf = nullptr;
  PeerPool* pool = nullptr;
  // Returns what all nodes hold now, after this daemon's mount shows what it can of that.
  std::function<std::vector<MemoryAttempt>()> look;
  // The directory of the save of that run which the mount shows; empty: none.  Absent: what is
  // protected is shown.
  std::function<std::string(const std::string& run)> shown = {};
  // The time of a save of that run and job (Store::SaveTimeOf).
  std::function<int64_t(const std::string& run, const std::string& job)> time_of;
  uint64_t rate = 0;  // of what is sent to one peer; 0: as fast as the link takes it
  std::chrono::milliseconds turn{500};          // between looks at what is not over
  std::chrono::milliseconds patience{600'000};  // with a save in flight
  std::function<void(std::string_view line)> log;
};

struct ProtectorStatus {
  std::string scheme;
  uint64_t held = 0;  // saves that were protected
  uint64_t passed_over = 0;
  uint64_t full = 0;  // saves that met a full shelf
  std::string last_protected;
  std::vector<std::string> steps;  // "run/7: ...", for each that is not protected yet
};

class Protector {
 public:
  explicit Protector(ProtectorOptions options);
  ~Protector();

  // Ranks of this daemon have ended their parts.  Returns at once.
  void Take(const AttemptName& name, uint64_t step, uint32_t world,
            const std::map<uint32_t, ReceivedFile>& files);

  ProtectorStatus status() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Incoming {
    PreparedPart part;  // without ranks
    std::map<uint32_t, ReceivedFile> files;
  };
  // A save of which this daemon's files are on the shelf.
  struct Generation {
    PreparedPart part;  // with this daemon's ranks
    std::map<uint32_t, SpreadFile> files;
    bool told = false;  // the holders know that it is protected
    Clock::time_point since = {};
  };
  using Slots = std::map<std::string, Generation>;  // by run

  // Copies what has come, run by run.
  Worker::Time CopyTurn();
  Result<Generation> Copy(Incoming incoming);
  void MakeReady(Generation generation);
  Worker::Time SendTurn();
  void TakeReady();
  void SpreadAll();
  static void Join(Generation& generation, Generation more);
  bool GivesWay(Generation& flight);
  // Where this node's files go now: the shape of their stripes, and nodes in the order in which
  // they are asked.
  struct Place {
    Result<StripeShape> shape;
    std::vector<Digest> nodes;
  };
  Place PlaceNow() const;
  // Sends what is not held by enough nodes; true if all of it is.
  bool Spread(Generation& generation);
  Status SpreadRank(Generation& generation, SpreadFile& file);
  Status SendMissing(SpreadFile& file, const std::vector<Digest>& nodes);
  Status SendUnit(SpreadFile& file, uint32_t unit, const Digest& node);
  std::set<Digest> PresentNodes() const;
  void Tell(Generation& generation);
  // Finds out what becomes of the save in flight; false if that is not known yet.
  bool Settle(Generation& flight, const std::vector<MemoryAttempt>& attempts);
  // Keeps a save that is protected, and what is shown until this one is.
  void Keep(Generation flight);
  bool Shows(const Generation& generation) const;
  // Older saves go once the mount shows what took their place.
  void LetOlderGo();
  void LetGo(Generation& generation);
  // Tells the holders that nobody needs what they hold of the file.
  void TakeBack(const std::string& directory, const SpreadFile& file);
  void Note(const std::string& run, std::string what);
  bool stopping() const { return sender_.stopping(); }
  void Say(const std::string& line) const;

  const ProtectorOptions options_;
  mutable Mutex mutex_;
  std::map<std::string, Incoming> incoming_ GUARDED_BY(mutex_);  // by run
  Slots ready_ GUARDED_BY(mutex_);
  std::map<std::string, std::string> notes_ GUARDED_BY(mutex_);  // what runs wait for
  uint64_t protected_ GUARDED_BY(mutex_) = 0;
  uint64_t passed_over_ GUARDED_BY(mutex_) = 0;
  uint64_t full_ GUARDED_BY(mutex_) = 0;
  std::string last_protected_ GUARDED_BY(mutex_);
  Slots flight_;           // the sender's
  Slots kept_;             // the sender's
  Slots older_;            // the sender's: shown still, where what is kept is not
  std::string said_full_;  // the copier's: the last line about a shelf that is full
  Worker copier_;          // last: they use all others
  Worker sender_;
};

}  // namespace ckptfs
