// SPDX-License-Identifier: Apache-2.0

#include "core/base/worker.h"

#include <utility>

#include "core/base/single_flight.h"

namespace ckptfs {

void Worker::Start(Time first, Turn turn, Failed failed) {
  thread_ = std::thread([this, first, turn = std::move(turn), failed = std::move(failed)] {
    Run(first, turn, failed);
  });
}

void Worker::Wake() {
  MutexLock lock(mutex_);
  woken_ = true;
  moved_.NotifyAll();
}

void Worker::Ask() {
  MutexLock lock(mutex_);
  stopping_ = true;
  moved_.NotifyAll();
}

void Worker::Stop() {
  Ask();
  if (thread_.joinable()) thread_.join();
}

bool Worker::stopping() const {
  MutexLock lock(mutex_);
  return stopping_;
}

bool Worker::Pause(Time end) {
  MutexLock lock(mutex_);
  while (!stopping_ && Clock::now() < end) moved_.WaitUntil(mutex_, end);
  return !stopping_;
}

bool Worker::WaitForTurn(Time due) {
  MutexLock lock(mutex_);
  while (!stopping_ && !woken_ && Clock::now() < due) {
    // The clock's last time would overflow in a wait.
    if (due == kWhenWoken) {
      moved_.Wait(mutex_);
    } else {
      moved_.WaitUntil(mutex_, due);
    }
  }
  woken_ = false;
  return !stopping_;
}

void Worker::Run(Time due, const Turn& turn, const Failed& failed) {
  while (WaitForTurn(due)) {
    const Result<Time> next = Caught([&]() -> Result<Time> { return turn(); });
    due = next ? *next : Clock::now() + kAfterFailure;
    if (!next && failed) failed(next.error());
  }
}

}  // namespace ckptfs
