// SPDX-License-Identifier: Apache-2.0
//
// By what daemons that share a store tell whether another one still works.  Nobody's clock
// but the observer's own counts, and no lock has to hold from one machine to another:
//
//   * a daemon that has something in work says so under nodes/<node>, with a number that
//     changes every kBeat, and with the names of what it has in work;
//   * it is gone when that has been the same for kGoneAfter of the observer's own monotonic
//     clock, in looks of which no two count for more than kLongestLook (so a machine that
//     slept takes nobody for gone), or when there is nothing;
//   * two processes of one kernel ask that kernel: the daemon has locked holds/<node>.
//
// A daemon that removes files which others may have in work lists those files first and reads the
// presences then: a node says a name before there is anything of that name.
//
// Thread safety: all methods may be called concurrently.  PresenceSaid has one thread of its
// own, which alone writes.

#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "core/base/digest.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/io/root.h"
#include "core/records/commit_records.h"

namespace ckptfs {

inline constexpr std::chrono::seconds kBeat{10};
inline constexpr std::chrono::seconds kGoneAfter{180};
inline constexpr std::chrono::seconds kLongestLook{30};

class PresenceSaid {
 public:
  // `directory`: where the storage lies on local disk; empty: nowhere.
  PresenceSaid(std::shared_ptr<Storage> storage, const std::string& directory,
               std::chrono::milliseconds beat = kBeat);
  // It is no longer said.
  ~PresenceSaid();

  const Digest& node() const { return node_; }
  const std::string& host() const { return host_; }
  // Says `name` until the result is gone, or somewhat longer.  BLOCKS: until it is said.
  Result<std::shared_ptr<const void>> Hold(const std::string& name);

 private:
  struct Held;
  Worker::Time Turn();
  void Withdraw();
  Status Say(const std::multiset<std::string>& names);

  const std::shared_ptr<Storage> storage_;
  const Digest node_;
  const std::chrono::milliseconds beat_;
  std::string host_;
  std::string boot_;
  uint64_t device_ = 0;
  std::shared_ptr<const void> lock_;
  // The turns' own.
  uint64_t beats_ = 0;
  bool there_ = false;  // the file of names
  Mutex mutex_;
  CondVar moved_;
  std::multiset<std::string> names_ GUARDED_BY(mutex_);
  uint64_t wanted_ GUARDED_BY(mutex_) = 0;  // how often a name was added
  uint64_t said_ GUARDED_BY(mutex_) = 0;    // how many of these were tried
  Status last_ GUARDED_BY(mutex_);          // the result of the last try
  Worker worker_;
};

enum class PresenceState {
  kWorks,
  kUnknown,  // not for long enough
  kGone,
};

class PresenceWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  explicit PresenceWatch(std::chrono::milliseconds gone = kGoneAfter) : gone_(gone) {}

  // Looks at the daemon whose newest record is `said`; nothing if it has no record.
  // `directory` is the store's, empty if the store is not on a local disk.
  PresenceState Look(const std::string& directory, const Digest& node,
                     const std::optional<NodePresence>& said, Time now);

 private:
  struct Seen {
    uint64_t beat = 0;
    std::chrono::steady_clock::duration same{0};  // for how long
    Time last;
    bool moved = false;
  };
  PresenceState LookAtBeat(const Digest& node, const NodePresence& said, Time now);

  const std::chrono::milliseconds gone_;
  Mutex mutex_;
  std::map<Digest, Seen> seen_ GUARDED_BY(mutex_);
};

// The newest record of one daemon; nothing if it has none.  One that cannot be read has beat 0.
Result<std::optional<NodePresence>> ReadPresence(const Storage& storage, const Digest& node);
// The newest records of all daemons of a store.  One that cannot be read has beat 0.
Result<std::map<Digest, NodePresence>> ReadPresences(const Storage& storage);

}  // namespace ckptfs
