// SPDX-License-Identifier: Apache-2.0
//
// MetricsText writes what mounts and daemons say of themselves (`ckptfs status --json`) in the
// text format of Prometheus.  Each metric is a row of a table that says where in that JSON its
// value is; docs/use/watch.md has the same list and a test compares the two.
//
// A number that the JSON lacks (of an older daemon, or of what is not in use) has no sample.
// Names in labels are untrusted: they are made printable and escaped, and of a list that others can
// make longer (runs, peers) at most kMostSeries are told.
//
// Thread safety: pure functions.
// Units: those of Prometheus: bytes, seconds; times are seconds since 1970.

#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace ckptfs {

inline constexpr size_t kMostSeries = 100;  // of one metric and one mount, of a list

// One mount, or a daemon without one.
struct MetricsSource {
  std::string store;
  std::string mountpoint;  // empty: a daemon without a mount
  bool up = true;          // it answers
  nlohmann::json status;   // what the daemon answers to "status"
};

// Every sample has the labels `store` and `mountpoint` of its source.
std::string MetricsText(std::span<const MetricsSource> sources);

// A metric, as the documentation lists it.
struct MetricInfo {
  std::string name;
  std::string type;  // "counter", "gauge", "summary"
  std::string help;
};
std::vector<MetricInfo> AllMetrics();

}  // namespace ckptfs
