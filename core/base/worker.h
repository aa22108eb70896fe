// SPDX-License-Identifier: Apache-2.0
//
// Worker is a thread that does one turn after the other until it is stopped: when
// somebody wakes it, and when the time comes that its last turn said.  An exception in a
// turn ends that turn only.
//
// Thread safety: all methods may be called concurrently; Start once.
// Lifetime: it is the last member of the object whose members its turns use, or that
// object's destructor calls Stop() first.
// Units: times of the steady clock.

#pragma once

#include <chrono>
#include <functional>
#include <thread>

#include "core/base/mutex.h"
#include "core/base/result.h"

namespace ckptfs {

class Worker {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  static constexpr Time kWhenWoken = Time::max();
  // After a turn that ended by an exception.
  static constexpr std::chrono::seconds kAfterFailure{1};

  // A turn's answer: when the next one is due, at the latest.
  using Turn = std::function<Time()>;
  using Failed = std::function<void(const Error&)>;

  Worker() = default;
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // The first turn is at `first` or when somebody wakes it.  `failed` is told of exceptions.
  void Start(Time first, Turn turn, Failed failed = nullptr);
  // One turn begins after this call.  Several calls before it ask for one turn.
  void Wake();
  // No turn begins any more.  BLOCKS: until a turn that has begun is over.
  // REQUIRES: not called in a turn.
  void Stop();
  // A turn that has begun learns by these that it should end; Pause waits until `end` and
  // returns false if the worker is stopped.
  bool stopping() const;
  bool Pause(Time end);
  // Stop() without waiting for the turn, for those who stop several at a time.
  void Ask();

 private:
  bool WaitForTurn(Time due);
  void Run(Time due, const Turn& turn, const Failed& failed);

  mutable Mutex mutex_;
  CondVar moved_;
  bool woken_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ckptfs
