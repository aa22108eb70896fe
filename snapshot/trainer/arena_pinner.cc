// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/arena_pinner.h"

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kPause{10};  // between tries

}  // namespace

ArenaPinner::ArenaPinner(std::span<std::byte> memory, uint64_t piece, Pin pin, Told told)
    : memory_(memory), piece_(piece), pin_(std::move(pin)), told_(std::move(told)) {
  thread_ = std::thread([this] { Run(); });
}

ArenaPinner::~ArenaPinner() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    moved_.NotifyAll();
  }
  thread_.join();
}

uint64_t ArenaPinner::pinned_bytes() const {
  MutexLock lock(mutex_);
  return std::min<uint64_t>(memory_.size(), pieces_.size() * piece_);
}

void ArenaPinner::Wait(uint64_t bytes) const {
  MutexLock lock(mutex_);
  while (pieces_.size() * piece_ < bytes && !failing_ && !ending_) moved_.Wait(mutex_);
}

void ArenaPinner::TryAgain() {
  MutexLock lock(mutex_);
  if (!failing_ || std::chrono::steady_clock::now() - last_try_ < kPause) return;
  failing_ = false;
  moved_.NotifyAll();
}

void ArenaPinner::Run() {
  while (true) {
    {
      MutexLock lock(mutex_);
      while (failing_ && !ending_) moved_.Wait(mutex_);
      if (ending_ || pieces_.size() * piece_ >= memory_.size()) return;
    }
    if (PinNext()) continue;
    MutexLock lock(mutex_);
    failing_ = true;
    last_try_ = std::chrono::steady_clock::now();
    moved_.NotifyAll();
  }
}

bool ArenaPinner::PinNext() {
  const uint64_t begin = pinned_bytes();
  const auto piece = memory_.subspan(begin, std::min<uint64_t>(piece_, memory_.size() - begin));
  std::shared_ptr<const void> held;
  const Status pinned = Caught([&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(held, pin_(piece));
    return {};
  });
  if (pinned) {
    MutexLock lock(mutex_);
    pieces_.push_back(std::move(held));
    moved_.NotifyAll();
  }
  told_(pinned_bytes(), pinned ? "" : pinned.error().message);
  return pinned.has_value();
}

}  // namespace ckptfs
