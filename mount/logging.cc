// SPDX-License-Identifier: Apache-2.0

#include "mount/logging.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/common.h>
#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/sinks/syslog_sink.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr size_t kFileBytes = 8 << 20;
constexpr size_t kRemembered = 512;  // distinct lines whose repetition is counted
constexpr std::chrono::seconds kQuiet{60};

// Lines seen in the last minute and how often they were swallowed.
class Repetition {
 public:
  // Tells if to write now, and how many lines were swallowed since the last time.
  bool Admit(const std::string& line, uint64_t& swallowed) {
    const auto now = std::chrono::steady_clock::now();
    MutexLock lock(mutex_);
    if (seen_.size() >= kRemembered) seen_.clear();
    auto [entry, fresh] = seen_.try_emplace(line, Entry{now, 0});
    if (!fresh && now - entry->second.written < kQuiet) {
      ++entry->second.swallowed;
      return false;
    }
    swallowed = entry->second.swallowed;
    entry->second = Entry{now, 0};
    return true;
  }

 private:
  struct Entry {
    std::chrono::steady_clock::time_point written;
    uint64_t swallowed = 0;
  };
  Mutex mutex_;
  std::unordered_map<std::string, Entry> seen_ GUARDED_BY(mutex_);
};

// Throws if a link, or anything else but a file, has our name:
// it is not written through.  Makes the file if it is not there.
void RefuseLinkAndMake(const spdlog::filename_t& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw spdlog::spdlog_ex(path + " is not a regular file (links are not followed)");
  }
  // spdlog's own open would make one that others may read.
  (void)OpenDescriptor(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
}

// Throws if the name was exchanged while it was opened.  A log names
// files and tensors: if our user owns it, nobody else may read it.
void CheckOpened(const spdlog::filename_t& path, std::FILE* file) {
  struct stat opened, named;
  const bool same = fstat(fileno(file), &opened) == 0 && lstat(path.c_str(), &named) == 0 &&
                    opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
  if (!same) throw spdlog::spdlog_ex(path + " was replaced while it was being opened");
  if (opened.st_uid == geteuid() && (opened.st_mode & 077) != 0) (void)fchmod(fileno(file), 0600);
}

spdlog::sink_ptr MakeSink(const std::string& target) {
  if (target == "stderr") return std::make_shared<spdlog::sinks::stderr_sink_mt>();
  if (target == "syslog") {
    return std::make_shared<spdlog::sinks::syslog_sink_mt>("ckptfs", LOG_PID, LOG_DAEMON, false);
  }
  spdlog::file_event_handlers handlers;
  handlers.before_open = RefuseLinkAndMake;
  handlers.after_open = CheckOpened;
  return std::make_shared<spdlog::sinks::rotating_file_sink_mt>(target, kFileBytes, 1, false,
                                                                handlers);
}

// Where lines go, and what they look like.
struct LogPlace {
  std::shared_ptr<spdlog::logger> logger;
  std::string target = "stderr";
  LogFormat format = LogFormat::kText;
};

// The logger that lines go to.  spdlog's own default must not be exchanged while somebody
// writes to it, and a target changes while requests are served.
class Target {
 public:
  void Set(LogPlace place) {
    MutexLock lock(mutex_);
    std::swap(place_, place);  // the old logger goes with its last user
  }
  LogPlace Get() {
    MutexLock lock(mutex_);
    LogPlace place = place_;
    if (!place.logger) place.logger = spdlog::default_logger();
    return place;
  }

 private:
  Mutex mutex_;
  LogPlace place_ GUARDED_BY(mutex_);
};

// Never destroyed: threads may log while the process exits.
Target& TheTarget() {
  static Target& target = *new Target;
  return target;
}

spdlog::level::level_enum LevelOf(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::err;
}

std::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "error";
}

std::string JsonLine(LogLevel level, const std::string& text, uint64_t swallowed) {
  const auto now =
      std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const auto milliseconds = now.time_since_epoch().count();
  nlohmann::ordered_json line = {
      {"time", fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(milliseconds / 1000),
                           milliseconds % 1000)},
      {"level", LevelName(level)},
      {"pid", ::getpid()},
      {"message", text}};
  if (swallowed != 0) line["repeated"] = swallowed;
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

Result<LogFormat> ParseLogFormat(std::string_view text) {
  if (text == "text") return LogFormat::kText;
  if (text == "json") return LogFormat::kJson;
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "': text or json"));
}

Status StartLogging(const std::string& target, LogFormat format) {
  try {
    auto logger = std::make_shared<spdlog::logger>("ckptfs", MakeSink(target));
    logger->set_pattern(format == LogFormat::kJson ? "%v"
                        : target == "stderr"       ? "ckptfs: %v"
                                                   : "%Y-%m-%dT%H:%M:%S.%e %P %L %v");
    logger->flush_on(spdlog::level::info);
    TheTarget().Set({std::move(logger), target, format});
  } catch (const std::exception& error) {
    return Fail(ErrorCode::kIo, StrCat("log ", target, ": ", std::string(error.what())));
  }
  return {};
}

Status ReopenLog() {
  const LogPlace place = TheTarget().Get();
  return StartLogging(place.target, place.format);
}

void Log(LogLevel level, std::string_view line) {
  static Repetition& repetition = *new Repetition;
  const std::string text = Printable(line);
  uint64_t swallowed = 0;
  if (!repetition.Admit(text, swallowed)) return;
  const LogPlace place = TheTarget().Get();
  if (place.format == LogFormat::kJson) {
    return place.logger->log(LevelOf(level), "{}", JsonLine(level, text, swallowed));
  }
  const std::string more = swallowed == 0 ? "" : StrCat(" (", swallowed, " more like this)");
  place.logger->log(LevelOf(level), "{}{}", text, more);
}

void FlushLog() { TheTarget().Get().logger->flush(); }

}  // namespace ckptfs
