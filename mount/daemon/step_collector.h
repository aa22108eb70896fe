// SPDX-License-Identifier: Apache-2.0
//
// StepCollector applies a daemon's retention policy: after each snapshot that became
// durable it removes the steps of that run which the policy does not keep, and what no
// step needs.  It has a thread of its own, so that nothing waits for it; a request that
// comes while it works is done once more afterwards.  It looks again at steps that somebody
// holds, after two seconds first and at last every five minutes.
//
// Thread safety: Ask may be called by any thread.
// Lifetime: the store must outlive it; the destructor waits for what is under way.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/worker.h"
#include "core/store/collect.h"

namespace ckptfs {

struct Retention {
  uint64_t keep_last = 0;
  uint64_t keep_every = 0;
  bool given() const { return keep_last != 0 || keep_every != 0; }
};

struct CollectorStatus {
  uint64_t removed = 0;
  uint64_t in_use = 0;  // steps that the last look found so
  uint64_t reclaimed_bytes = 0;
  std::string last_failure;
};

class StepCollector {
 public:
  struct Hooks {
    std::function<void(const StepRecord&)> let_go;
    std::function<void(const StepRecord&)> removed;
  };
  // With a policy it begins by reclaiming what processes that were killed have left.
  StepCollector(Store& store, const Retention& retention, Hooks hooks);
  ~StepCollector();

  void SetRetention(const Retention& retention);
  // After a snapshot of `run` became durable: nothing without a policy.
  void Ask(const std::string& run);
  // Removes what was written in vain.
  void Reclaim();
  CollectorStatus status() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Look {
    Clock::time_point due;
    Clock::duration pause;  // before the next one, if something is held then
  };

  // Does the look that is due; the time of the next one.
  Worker::Time Turn();
  // True if something would have gone that somebody holds.
  bool Collect(const std::optional<std::string>& run);
  void Wake(std::optional<std::string> run);
  Retention retention() const;

  Store& store_;
  const Hooks hooks_;
  mutable Mutex mutex_;
  Retention retention_ GUARDED_BY(mutex_);
  std::map<std::optional<std::string>, Look> asked_ GUARDED_BY(mutex_);  // nothing: reclaim only
  CollectorStatus status_ GUARDED_BY(mutex_);
  Worker worker_;  // last: it uses all others
};

}  // namespace ckptfs
