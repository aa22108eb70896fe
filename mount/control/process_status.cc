// SPDX-License-Identifier: Apache-2.0

#include "mount/control/process_status.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

namespace ckptfs {
namespace {

using SystemClock = std::chrono::system_clock;

double SecondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

double SecondsNow() {
  return std::chrono::duration<double>(SystemClock::now().time_since_epoch()).count();
}

}  // namespace

nlohmann::json ProcessJson() {
  static const double start = SecondsNow();
  nlohmann::json json = {{"version", CKPTFS_VERSION}, {"start_time_seconds", start}};
  rusage used{};
  if (::getrusage(RUSAGE_SELF, &used) == 0) {
    json["cpu_seconds"] = SecondsOf(used.ru_utime) + SecondsOf(used.ru_stime);
  }
  uint64_t total = 0;
  uint64_t resident = 0;  // both in pages
  if (std::ifstream("/proc/self/statm") >> total >> resident) {
    json["resident_bytes"] = resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  }
  std::error_code error;
  const std::filesystem::directory_iterator descriptors("/proc/self/fd", error);
  if (!error) json["open_fds"] = std::distance(begin(descriptors), end(descriptors)) - 1;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) json["max_fds"] = limit.rlim_cur;
  return json;
}

}  // namespace ckptfs
