// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_json.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <ctime>

namespace ckptfs {

nlohmann::json RecordJson(const StepRecord& record) {
  return {{"run", record.run},
          {"id", record.id},
          {"step", record.run + "/" + record.id},
          {"iteration", record.iteration},
          {"mtime_ns", record.mtime_ns},
          {"source", record.source},
          {"manifest", record.manifest.Hex()}};
}

void PrintJson(const nlohmann::json& json) {
  const std::string text = json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace);
  fmt::print("{}\n", text);
}

std::string LocalTime(int64_t nanoseconds) {
  const time_t seconds = nanoseconds / 1'000'000'000;
  tm parts{};
  ::localtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return text.data();
}

}  // namespace ckptfs
