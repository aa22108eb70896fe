// SPDX-License-Identifier: Apache-2.0
//
// ArenaPinner page-locks an arena for devices (Copier::Pin), a piece after the other in a
// thread of its own: neither a save nor the work that others give a device waits for all of it.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the memory must outlive it; the end waits for the piece that is under way.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"

namespace ckptfs {

class ArenaPinner {
 public:
  // Page-locks a piece for as long as the result is kept.
  using Pin = std::function<Result<std::shared_ptr<const void>>(std::span<std::byte>)>;
  // Called after each piece by the thread: how many bytes are page-locked, and why the next piece
  // could not be; empty: it could.
  using Told = std::function<void(uint64_t pinned, const std::string& why)>;

  // Begins.  Pieces have `piece` bytes, the last one may have fewer.
  ArenaPinner(std::span<std::byte> memory, uint64_t piece, Pin pin, Told told);
  ~ArenaPinner();
  ArenaPinner(const ArenaPinner&) = delete;
  ArenaPinner& operator=(const ArenaPinner&) = delete;

  // Returns how many bytes are page-locked: the first of the memory.
  uint64_t pinned_bytes() const;
  bool IsDone() const { return pinned_bytes() == memory_.size(); }
  // Returns when the first `bytes` are page-locked, or cannot be for now.  BLOCKS: until then.
  void Wait(uint64_t bytes) const;
  // Tries again what failed, if the last try is some time ago.
  void TryAgain();

 private:
  void Run();
  bool PinNext();

  const std::span<std::byte> memory_;
  const uint64_t piece_;
  const Pin pin_;
  const Told told_;
  mutable Mutex mutex_;
  mutable CondVar moved_;
  std::vector<std::shared_ptr<const void>> pieces_ GUARDED_BY(mutex_);
  bool failing_ GUARDED_BY(mutex_) = false;  // the thread sleeps until it tries again
  bool ending_ GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point last_try_ GUARDED_BY(mutex_){};
  std::thread thread_;
};

}  // namespace ckptfs
