// SPDX-License-Identifier: Apache-2.0
//
// The account of `ckptfs top`: how fast the counters of a daemon grew between two answers, and what
// is now.  One JSON object per daemon is the whole account; the text is made of it.
//
// Thread safety: pure functions.
// Units: bytes, seconds; rates are a second's.

#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

namespace ckptfs {

// One answer of a daemon.
struct TopSample {
  std::string store;
  std::string mountpoint;  // empty: a daemon without a mount
  int pid = 0;
  std::chrono::steady_clock::time_point time;
  nlohmann::json status;  // DaemonStatus::Render
};

// {"mountpoint", "store", "pid", "seconds", "rates", "now"}; "rates" is null where `before` is not
// the same daemon's, or null.
nlohmann::json TopJson(const TopSample* before, const TopSample& now);

// Some lines, the last one ended.
std::string TopText(const nlohmann::json& top);

// The lines of it about the snapshots of a status.
std::string SnapshotsText(const nlohmann::json& snapshots);

}  // namespace ckptfs
