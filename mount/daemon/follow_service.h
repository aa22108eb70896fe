// SPDX-License-Identifier: Apache-2.0
//
// FollowService keeps a directory in which a job saves adopted (core/follow/follow.h): it looks
// when something there changes, and from time to time.
//
// Thread safety: Start once; Stop and status by any thread.  One worker of its own.
// Lifetime: the store and what the hooks use must outlive it.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/follow/follow.h"
#include "core/io/tree_watch.h"
#include "core/model/family.h"
#include "core/store/store.h"
#include "mount/daemon/adoption.h"

namespace ckptfs {

struct FollowStatus {
  std::string path;
  std::string run;
  bool hears = false;  // changes; else it polls
  size_t adopted = 0;
  uint64_t adopted_total = 0;  // those that were withdrawn later, too
  uint64_t withdrawn_total = 0;
  // When the last step was adopted, and how long ago its files had changed then.
  int64_t last_adopted_ns = 0;  // 0: none was
  double lag_seconds = 0;
  double look_seconds = 0;     // of all looks
  uint64_t waiting_steps = 0;  // neither of the next two
  uint64_t left_behind_steps = 0;
  uint64_t refused_steps = 0;
  std::vector<Follower::Waiting> waiting;  // the first hundred
  std::vector<StepRecord> committed;       // the last hundred that were adopted
  std::string idle;                        // why nothing was adopted so far
  std::string switched;  // that the path was a link which leads elsewhere now; "" if it does not
};

class FollowService {
 public:
  struct Hooks {
    std::function<void(const std::vector<StepRecord>&)> adopted;    // never empty
    std::function<void(const std::vector<StepRecord>&)> withdrawn;  // never empty
    std::function<void(std::string_view)> say;                      // one line for the log
  };

  // Success if there is a directory to follow and, with --link, its files can be linked into the
  // store at `store`; asked before that is opened.
  static Status Check(const std::string& store, const AdoptRequest& request);
  // Errors: those of the request; kNotFound if neither the directory nor what it would lie in is
  // there; kInvalid if it is a file.  Looks for the first time; nothing there is no error.
  // BLOCKS: on that.
  static Result<std::unique_ptr<FollowService>> Create(Store& store, const AdoptRequest& request,
                                                       Hooks hooks);
  ~FollowService();

  // The run that the steps of the directory belong to, as far as its name tells while there is
  // none.  REQUIRES: not started.
  const std::string& run() const { return run_; }
  // The steps that the first look adopted, by iteration.
  const std::vector<StepRecord>& first() const { return first_; }

  void Start();
  void Stop();
  FollowStatus status() const;

 private:
  FollowService(Store& store, Hooks hooks, TreeWatch watch);
  Worker::Time Turn();
  std::vector<StepRecord> Look();  // returns the steps that it adopted
  void Count(const Follower::Seen& seen, double look_seconds) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountCommitted(const Follower::Seen& seen) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayIdle(bool first);
  void SaySwitched();

  Store& store_;
  const Hooks hooks_;
  TreeWatch watch_;
  std::string link_;  // that led to the directory; "" without one
  std::string run_;
  std::vector<StepRecord> first_;
  FamilySet families_;
  std::vector<std::unique_ptr<Source>> sources_;
  std::unique_ptr<Follower> follower_;
  Follower::Time next_;
  Follower::Time earliest_;
  mutable Mutex mutex_;
  bool told_unread_ = false;
  FollowStatus status_ GUARDED_BY(mutex_);
  Worker worker_;  // last: it uses all others
};

}  // namespace ckptfs
