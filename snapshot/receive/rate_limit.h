// SPDX-License-Identifier: Apache-2.0
//
// RateLimit says whether somebody may do something once more: so often a second in the long run,
// and so often at once.
//
// Thread safety: none.
// Units: times, and things done.

#pragma once

#include <algorithm>
#include <chrono>

namespace ckptfs {

class RateLimit {
 public:
  using Time = std::chrono::steady_clock::time_point;

  RateLimit(double per_second, double at_once, Time now)
      : per_second_(per_second), at_once_(at_once), counted_(now), left_(at_once) {}
  // Counts the time that has passed.
  void Pass(Time now) {
    const double seconds = std::chrono::duration<double>(now - counted_).count();
    left_ = std::min(at_once_, left_ + std::max(seconds, 0.0) * per_second_);
    counted_ = now;
  }
  bool Allows() const { return left_ >= 1; }
  void Use() { left_ -= 1; }

 private:
  const double per_second_;
  const double at_once_;
  Time counted_;
  double left_;
};

}  // namespace ckptfs
