// SPDX-License-Identifier: Apache-2.0
//
// Schedule decides by a seed in which order threads come past points of a test: at each one a
// thread lets as many others come past theirs as its own numbers say.  When all stand at
// points, or wait for others, the one that is due first goes on.  No time decides anything,
// so that a seed that fails is run again with the same decisions.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>

namespace ckptfs::testing_support {

class Schedule {
 public:
  explicit Schedule(unsigned seed) : seed_(seed) {}

  // `actor` is on the move: nobody goes on who would have waited for it.
  void Enter(uint32_t actor) {
    const std::lock_guard lock(mutex_);
    ++Of(actor).entered;
    ++moving_;
  }
  // As often as it entered; of none at all nothing happens.
  void Leave(uint32_t actor) {
    const std::lock_guard lock(mutex_);
    Actor& one = Of(actor);
    if (one.entered == 0) return;
    --one.entered;
    if (!one.stands) --moving_;
    moved_.notify_all();
  }

  // BLOCKS: until it is this actor's turn; not if it has not entered, or leaves.
  void Point(uint32_t actor) {
    std::unique_lock lock(mutex_);
    Actor& one = Of(actor);
    if (one.entered == 0) return;
    one.due = ++passed_ + one.random() % 6;
    one.stands = true;
    --moving_;
    moved_.notify_all();
    // A thread that is on the move and never comes by again (a copier whose save was dropped before
    // it began) must not end the test, nor hold everybody up at every point.
    const auto turn = [&] { return one.entered == 0 || IsNext(one); };
    if (!moved_.wait_for(lock, std::chrono::seconds(5), turn)) WaitForNobodyElse();
    one.stands = false;
    if (one.entered > 0) ++moving_;
    moved_.notify_all();
  }

  // While it is there its actor waits for others.
  class Waiting {
   public:
    Waiting(Schedule& schedule, uint32_t actor) : schedule_(schedule), actor_(actor) {
      schedule_.Leave(actor_);
    }
    ~Waiting() { schedule_.Enter(actor_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Schedule& schedule_;
    const uint32_t actor_;
  };

 private:
  struct Actor {
    std::mt19937 random;
    int entered = 0;
    bool stands = false;
    uint64_t due = 0;  // how many points have been passed then
  };
  Actor& Of(uint32_t actor) {
    const auto [at, is_new] = actors_.try_emplace(actor);
    if (is_new) at->second.random.seed(seed_ * 1000 + actor);
    return at->second;
  }
  void WaitForNobodyElse() {
    for (auto& [number, actor] : actors_)
      actor.entered = std::min(actor.entered, actor.stands ? 1 : 0);
    moving_ = 0;
  }
  bool IsNext(const Actor& one) const {
    if (one.due <= passed_) return true;
    if (moving_ > 0) return false;
    for (const auto& [number, other] : actors_) {
      if (other.stands && other.due < one.due) return false;
    }
    return true;
  }

  const unsigned seed_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::map<uint32_t, Actor> actors_;
  uint64_t passed_ = 0;
  int moving_ = 0;
};

}  // namespace ckptfs::testing_support
