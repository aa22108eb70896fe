// SPDX-License-Identifier: Apache-2.0

#include "mount/control/step_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "mount/options.h"

namespace ckptfs {

nlohmann::json RecordJson(const StepRecord& record) {
  return {{"run", record.run},
          {"id", record.id},
          {"step", record.run + "/" + record.id},
          {"iteration", record.iteration},
          {"mtime_ns", record.mtime_ns},
          {"source", record.source},
          {"provisional", record.provisional},
          {"compacted", record.compacted},
          {"manifest", record.manifest.Hex()}};
}

nlohmann::json ErrorJson(const Error& error) {
  const auto known = [](const std::string& text) {
    return text.empty() ? nlohmann::json(nullptr) : nlohmann::json(text);
  };
  return {{"code", std::string(ErrorCodeName(error.code))},
          {"message", error.message},
          {"layout", known(error.layout)},
          {"parameter", known(error.parameter)},
          {"needs", known(error.needs)}};
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

namespace {

// Characters, each of which is taken to be one place wide.
size_t WidthOf(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xc0) != 0x80; }));
}

}  // namespace

void PrintColumns(const std::vector<std::vector<std::string>>& rows, std::string_view align) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], WidthOf(row[i]));
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - WidthOf(row[i]), ' ');
      const bool right = i < align.size() && align[i] == 'r';
      line += right ? pad + row[i] : row[i];
      if (i + 1 < row.size()) line += (right ? "" : pad) + "  ";
    }
    fmt::print("{}\n", line);
  }
}

std::string Ago(int64_t nanoseconds) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t age = std::chrono::nanoseconds(now).count() - nanoseconds;
  return age >= 0 ? HumanDuration(age) + " ago" : "in " + HumanDuration(-age);
}

}  // namespace ckptfs
