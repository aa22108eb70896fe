// SPDX-License-Identifier: Apache-2.0

#include "mount/control/daemon_record.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "core/base/descriptor.h"
#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "mount/control/control_protocol.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxRecord = 64 << 10;
constexpr std::string_view kSuffix = ".json";

// Several daemons without a mount may be there, each by its own name.
Result<std::string> PathOf(const std::string& store, const std::string& mountpoint, int pid,
                           bool create) {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, SocketDirectory(create));
  const std::string place = mountpoint.empty() ? StrCat("daemon ", pid) : mountpoint;
  std::string name = SocketName(store, place);
  name.resize(name.rfind('.'));
  return StrCat(directory, "/", name, kSuffix);
}

int64_t Now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::nanoseconds(now).count();
}

// When the process began, in the kernel's ticks; 0 if it is not there, or is over.
int64_t StartTicks(int pid) {
  std::ifstream stat(StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(stat, line);
  const size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream words(line.substr(name_end + 1));
  std::string word;
  constexpr int kState = 3, kStart = 22;  // proc(5) counts from 1
  for (int field = kState; words >> word; ++field) {
    if (field == kState && (word == "Z" || word == "X")) return 0;
    if (field == kStart) return std::strtoll(word.c_str(), nullptr, 10);
  }
  return 0;
}

std::optional<DaemonFacts> Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxRecord, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  const Json json = Json::parse(text, nullptr, false);
  struct stat info {};
  if (!json.is_object() || ::stat(path.c_str(), &info) != 0) return std::nullopt;
  const auto word = [&](const char* key) {
    return json.contains(key) && json[key].is_string() ? json[key].get<std::string>() : "";
  };
  const auto number = [&](const char* key) {
    return json.contains(key) && json[key].is_number_integer() ? json[key].get<int64_t>() : 0;
  };
  DaemonFacts facts{word("store"),
                    word("mountpoint"),
                    static_cast<int>(number("pid")),
                    word("version"),
                    number("started_ns"),
                    word("log"),
                    word("again"),
                    0,
                    number("start_ticks")};
  facts.seen_ns = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
  return facts;
}

}  // namespace

Result<std::unique_ptr<DaemonRecord>> DaemonRecord::Write(const std::string& store,
                                                          const std::string& mountpoint,
                                                          const std::string& log,
                                                          const std::string& again) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, PathOf(store, mountpoint, ::getpid(), true));
  Json json = {{"store", store},
               {"mountpoint", mountpoint},
               {"pid", ::getpid()},
               {"version", CKPTFS_VERSION},
               {"started_ns", Now()},
               {"log", log},
               {"start_ticks", StartTicks(::getpid())}};
  if (again.size() < kMaxRecord / 4)
    json["again"] = again;  // of thousands of words nobody types one
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  ::unlink(path.c_str());  // a predecessor's, which was killed
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid() ||
      ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return Fail(ErrnoError(errno, path));
  }
  return std::unique_ptr<DaemonRecord>(new DaemonRecord(path, std::move(file)));
}

DaemonRecord::~DaemonRecord() {
  struct stat own {
  }, there{};
  if (::fstat(file_.get(), &own) != 0 || ::stat(path_.c_str(), &there) != 0) return;
  if (own.st_ino == there.st_ino && own.st_dev == there.st_dev) ::unlink(path_.c_str());
}

void DaemonRecord::Beat() const { ::futimens(file_.get(), nullptr); }

std::vector<DaemonFacts> FindDaemonRecords(std::string_view store) {
  std::vector<DaemonFacts> found;
  const auto directory = SocketDirectory(false);
  if (!directory) return found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(*directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!name.ends_with(kSuffix)) continue;
    if (!store.empty() && !name.starts_with(SocketPrefix(store))) continue;
    if (auto facts = Read(entry->path())) found.push_back(*std::move(facts));
  }
  std::sort(found.begin(), found.end(),
            [](const DaemonFacts& a, const DaemonFacts& b) { return a.mountpoint < b.mountpoint; });
  return found;
}

// A pid is used again, but not by a process that began at the same moment.
bool EndsWithin(const Descriptor& process, int milliseconds) {
  pollfd event{process.get(), POLLIN, 0};
  return ::poll(&event, 1, milliseconds) == 1;
}

bool IsAlive(const DaemonFacts& daemon) {
  return daemon.pid > 0 && daemon.start_ticks != 0 && StartTicks(daemon.pid) == daemon.start_ticks;
}

void RemoveDaemonRecord(const DaemonFacts& daemon) {
  const auto path = PathOf(daemon.store, daemon.mountpoint, daemon.pid, false);
  if (path) ::unlink(path->c_str());
}

}  // namespace ckptfs
