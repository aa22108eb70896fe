// SPDX-License-Identifier: Apache-2.0
//
// The `status` command shows what live mounts do, and which mounts are dead.  Each begins with a
// line that answers the first question in an incident.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/commands/mount_path.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_readers_text.h"
#include "mount/commands/top_view.h"
#include "mount/control/daemon_record.h"
#include "mount/control/step_json.h"
#include "mount/fuse/mount_table.h"
#include "mount/metrics/metrics_text.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr std::chrono::seconds kGreets{5};
constexpr std::chrono::seconds kAnswers{30};

struct StatusFlags {
  LiveOptions live;
  bool verbose = false;
  bool json = false;
  bool metrics = false;
};

// "key: value" lines, nested objects indented.
void PrintTree(const Json& json, const std::string& indent) {
  const bool list = json.is_array();
  for (const auto& [key, value] : json.items()) {
    const std::string label = list ? indent + "- " : indent + key + ": ";
    if (value.is_structured() && !value.empty()) {
      fmt::print("{}\n", Printable(label));
      PrintTree(value, indent + "  ");
    } else {
      const std::string text = value.is_string()
                                   ? value.get<std::string>()
                                   : value.dump(-1, ' ', false, Json::error_handler_t::replace);
      fmt::print("{}{}\n", Printable(label), Printable(text));
    }
  }
}

// ---- what there is to tell -----------------------------------------------------

Json FactsJson(const DaemonFacts& facts) {
  return {{"version", facts.version},
          {"started_ns", facts.started_ns},
          {"seen_ns", facts.seen_ns},
          {"log", facts.log}};
}

// The command that mounts again where the daemon is gone: as it was started, if that is known.
std::string Cure(const std::string& store, const std::string& mountpoint,
                 const DaemonFacts* facts) {
  std::string again = facts == nullptr ? "" : facts->again;
  if (mountpoint.empty()) {
    if (again.empty()) again = StrCat("ckptfs daemon --store ", ShellWord(store));
    return StrCat("`", again, "` starts one");
  }
  const std::string where = ShellWord(mountpoint);
  if (again.empty()) again = StrCat("ckptfs mount --store ", ShellWord(store), " ", where);
  return StrCat("`", again, "` mounts it again, `ckptfs umount ", where, "` cleans it up");
}

Result<Json> AliveJson(const LiveMount& mount, const std::vector<DaemonFacts>& records) {
  const auto text = AskDaemon(mount, "status", {}, kAnswers);
  if (!text) return Fail(Error(text.error()).WithContext(mount.mountpoint));
  Json json = {{"mountpoint", mount.mountpoint},
               {"store", mount.store},
               {"pid", mount.pid},
               {"alive", true},
               {"status", Json::parse(*text, nullptr, false)}};
  for (const DaemonFacts& facts : records) {
    if (facts.pid == mount.pid && facts.mountpoint == mount.mountpoint) {
      json["daemon"] = FactsJson(facts);
    }
  }
  return json;
}

// A mount that is there with nobody behind it; nothing if it is not, or not for this user to ask.
std::optional<Json> DeadJson(const std::string& store, const std::string& mountpoint,
                             const DaemonFacts* facts) {
  if (facts != nullptr && IsAlive(*facts)) {
    return Json{{"mountpoint", mountpoint}, {"store", store},
                {"pid", facts->pid},        {"alive", true},
                {"answers", false},         {"daemon", FactsJson(*facts)}};
  }
  Json json = {{"mountpoint", mountpoint},
               {"store", store},
               {"alive", false},
               {"cure", Cure(store, mountpoint, facts)}};
  if (facts != nullptr) json["daemon"] = FactsJson(*facts);
  return json;
}

const DaemonFacts* RecordOf(const std::vector<DaemonFacts>& records,
                            const std::string& mountpoint) {
  const auto found = std::find_if(records.begin(), records.end(), [&](const DaemonFacts& one) {
    return one.mountpoint == mountpoint;
  });
  return found == records.end() ? nullptr : &*found;
}

// Mounts of ckptfs that no daemon of this user answers for.
std::vector<Json> DeadMounts(const std::string& store, const std::string& only,
                             const std::vector<LiveMount>& live,
                             const std::vector<DaemonFacts>& records) {
  std::vector<Json> dead;
  const auto mounts = ReadMounts();
  for (const MountEntry& mount : mounts ? *mounts : std::vector<MountEntry>()) {
    if (mount.type != "fuse.ckptfs" || (!store.empty() && mount.source != store)) continue;
    if (!only.empty() && mount.mountpoint != only) continue;
    const bool answers = std::any_of(live.begin(), live.end(), [&](const LiveMount& one) {
      return one.mountpoint == mount.mountpoint;
    });
    if (answers) continue;
    const DaemonFacts* const facts = RecordOf(records, mount.mountpoint);
    // Another user's that lives, maybe where one of ours was.
    const bool ours = facts != nullptr && IsAlive(*facts);
    if (!ours && !IsDeadMount(mount.mountpoint)) continue;
    if (auto json = DeadJson(mount.source, mount.mountpoint, facts))
      dead.push_back(*std::move(json));
  }
  if (!only.empty()) return dead;
  for (const DaemonFacts& facts : records) {  // of daemons without a mount
    if (facts.mountpoint.empty() && !IsAlive(facts)) {
      dead.push_back(*DeadJson(facts.store, "", &facts));
    }
  }
  return dead;
}

// ---- in words ------------------------------------------------------------------

int64_t NowNs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::nanoseconds(now).count();
}

std::string WhereOf(const Json& mount) {
  const std::string mountpoint = mount.value("mountpoint", "");
  return mountpoint.empty() ? StrCat("daemon of ", mount.value("store", "")) : mountpoint;
}

uint64_t Number(const Json& json, const char* key) {
  return json.is_object() && json.contains(key) && json[key].is_number_unsigned()
             ? json[key].get<uint64_t>()
             : 0;
}

// "1.2 GiB of 5.8 GiB filled, 14.0 MiB of indexes".
std::string MemoryText(const Json& status) {
  const Json none = Json::object();
  const auto part = [&](const char* key) -> const Json& {
    return status.contains(key) && status[key].is_object() ? status[key] : none;
  };
  const uint64_t indexes = Number(status, "listed_bytes") + Number(part("views"), "bytes") +
                           Number(part("plans"), "bytes") + Number(status, "loaded_bytes");
  const Json& filled = part("materialised");
  std::string kept = StrCat(HumanBytes(indexes), " of indexes");
  if (filled.empty()) return kept;
  return StrCat(HumanBytes(Number(filled, "bytes")), " of ", HumanBytes(Number(filled, "budget")),
                " filled, ", kept);
}

std::string HealthText(const Json& mount) {
  const Json facts = mount.value("daemon", Json::object());
  const std::string log = facts.value("log", "");
  const std::string where_log = log.empty() ? "" : StrCat("; log: ", log);
  if (!mount.value("alive", false)) {
    const int64_t seen = facts.value("seen_ns", int64_t{0});
    const std::string since =
        seen == 0 ? "" : StrCat(" since ", LocalTime(seen), " (", Ago(seen), ")");
    return StrCat("DEAD: its daemon is gone", since, where_log, "; ", mount.value("cure", ""));
  }
  std::string text = StrCat("alive");
  const int64_t started = facts.value("started_ns", int64_t{0});
  if (started != 0) text += StrCat(" for ", HumanDuration(NowNs() - started));
  text += StrCat(" (pid ", mount.value("pid", 0));
  if (facts.contains("version")) text += StrCat(", ckptfs ", facts.value("version", ""));
  text += ")";
  if (!mount.value("answers", true)) return StrCat(text, ", but it DOES NOT ANSWER", where_log);
  const Json& status = mount["status"];
  if (status.contains("view")) {
    text += status["view"].is_string() ? StrCat("; /view -> ", status["view"].get<std::string>())
                                       : std::string("; no /view");
    const size_t stale = status.value("unsound", Json::object()).size();
    text += stale == 0 ? std::string("; no stale sources") : StrCat("; ", stale, " STALE sources");
    text += StrCat("; memory: ", MemoryText(status));
  }
  return text + where_log;
}

void PrintServed(const Json& status) {
  const Json requests = status.value("requests", Json::object());
  const Json opens = status.value("opens", Json::object());
  std::string ways;
  for (const auto& [mode, count] : opens.items()) {
    if (count != 0) ways += StrCat(ways.empty() ? "" : ", ", mode, " ", count.get<uint64_t>());
  }
  fmt::print("  served: {} in {}, {} read from sources; {}{}\n",
             HumanBytes(Number(status, "bytes_served")), Counted(Number(requests, "read"), "read"),
             HumanBytes(Number(status, "bytes_read")),
             Counted(Number(status, "open_files"), "open file"),
             ways.empty() ? "" : StrCat("; opens so far: ", ways));
  const Json unsound = status.value("unsound", Json::object());
  for (const auto& [step, why] : unsound.items()) {
    fmt::print("  {} {}: {}\n", Printable(why.value("state", "")), Printable(step),
               Printable(why.value("reason", "")));
  }
  const Json errors = status.value("recent_errors", Json::array());
  const size_t first = errors.size() > 3 ? errors.size() - 3 : 0;
  for (size_t i = first; i < errors.size(); ++i) {
    fmt::print("  error: {}\n",
               Printable(errors[i].is_string() ? errors[i].get<std::string>() : ""));
  }
}

// The file that options came from, and which changes of it are not in force.
void PrintConfiguration(const Json& configuration) {
  if (!configuration.is_object() || !configuration.contains("file")) return;
  if (!configuration["file"].is_string()) return;
  std::string waiting;
  for (const Json& name : configuration.value("needs_restart", Json::array())) {
    if (name.is_string()) waiting += StrCat(waiting.empty() ? "" : ", ", name.get<std::string>());
  }
  fmt::print("  config: {}{}\n", Printable(configuration["file"].get<std::string>()),
             waiting.empty() ? "" : StrCat("; waits for the next start: ", Printable(waiting)));
}

// A mount that no job has saved through so far says nothing of it.
bool AnySnapshots(const Json& status) {
  const Json snapshots = status.value("snapshots", Json::object());
  const char* const counters[] = {"ranks",   "arena_bytes", "incoming",  "waiting",
                                  "durable", "dropped",     "full_drops"};
  return std::any_of(std::begin(counters), std::end(counters),
                     [&](const char* counter) { return Number(snapshots, counter) != 0; }) ||
         snapshots.contains("peers") ||
         Number(snapshots.value("spool", Json::object()), "saves") != 0;
}

// The directory of a job, and what is not whole in it.
void PrintFollow(const Json& follow) {
  const uint64_t adopted = Number(follow, "adopted");
  fmt::print("  follows {}: {} step{} adopted\n", Printable(follow.value("path", "")), adopted,
             adopted == 1 ? "" : "s");
  const Json waiting = follow.value("waiting", Json::array());
  const bool idle = waiting.empty() && follow.contains("idle") && follow["idle"].is_string();
  if (idle) fmt::print("    {}\n", Printable(follow["idle"].get<std::string>()));
  const bool switched = follow.contains("switched") && follow["switched"].is_string();
  if (switched) fmt::print("    {}\n", Printable(follow["switched"].get<std::string>()));
  for (const Json& step : waiting) {
    const char* const state = step.value("left_behind", false) ? "died:"
                              : step.value("refused", false)   ? "cannot be adopted:"
                                                               : "not whole yet:";
    fmt::print("    {} {}: {}\n", state, Printable(step.value("id", "")),
               Printable(step.value("why", "")));
  }
}

// A mount that jobs save into.
void PrintIngest(const Json& ingest) {
  const uint64_t open = Number(ingest, "open_for_writing");
  fmt::print(
      "  jobs save here into {}, {}; {} open for writing\n",
      Printable(ingest.value("directory", "")),
      ingest.value("passthrough", false) ? "written by the kernel" : "written through the daemon",
      Counted(open, "file"));
}

void PrintMount(const Json& mount, bool verbose) {
  fmt::print("{}: {}\n", Printable(WhereOf(mount)), Printable(HealthText(mount)));
  if (!mount.contains("status") || !mount["status"].is_object()) return;
  const Json& status = mount["status"];
  if (verbose) return PrintTree(status, "  ");
  PrintConfiguration(status.value("configuration", Json()));
  const Json runs = status.value("runs", Json::object());
  for (const auto& [run, steps] : runs.items()) {
    const uint64_t count = Number(steps, "steps");
    const uint64_t lives = Number(steps, "lives");
    fmt::print("  run {}: {} step{}{}, latest {}\n", Printable(run), count, count == 1 ? "" : "s",
               lives > 1 ? StrCat(" of ", lives, " lives") : "",
               Printable(steps.value("latest", "")));
  }
  if (status.contains("ingest")) PrintIngest(status["ingest"]);
  for (const Json& follow : status.value("following", Json::array())) PrintFollow(follow);
  if (status.contains("requests")) PrintServed(status);
  if (!AnySnapshots(status)) return;
  fmt::print("{}", SnapshotsText(status["snapshots"]));
}

// Writes for Prometheus what the mounts say, and which of them are gone.
std::string MetricsOf(const LiveScope& scope, const std::vector<LiveMount>& alive,
                      const std::vector<DaemonFacts>& records) {
  std::vector<MetricsSource> sources;
  for (const LiveMount& mount : alive) {
    const auto text = AskDaemon(mount, "status", {{"depth", "counters"}}, kAnswers);
    sources.push_back({mount.store, mount.mountpoint, text.has_value(),
                       text ? Json::parse(*text, nullptr, false) : Json()});
  }
  for (const Json& dead : DeadMounts(scope.store, scope.mountpoint, alive, records)) {
    sources.push_back({dead.value("store", ""), dead.value("mountpoint", ""), false, {}});
  }
  return MetricsText(sources);
}

// Adds who sees the step that /view shows.  BLOCKS: on looking at each of its files.
void AddReaders(const LiveMount& mount, Json& status) {
  if (!status.is_object() || !status.contains("view") || !status["view"].is_string()) return;
  const std::string view = BytesOfUtf8(status["view"].get<std::string>());
  const std::string name = StepOfView(view);
  const auto step = LoadSubject(name, mount.store, {});
  if (!step) return;
  const auto blobs = BlobReader::Create((*step)->model, ReaderOptions());
  const ReadersText readers = DescribeReaders(**step, *blobs);
  status["view_seen_by"] = readers.who;
  if (!readers.kept_out.empty()) status["view_kept_out_by"] = readers.kept_out;
}

Status RunStatus(const StatusFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const LiveScope scope, ScopeOf(options.live));
  const std::vector<DaemonFacts> records = FindDaemonRecords(scope.store);
  const auto mounts = ChooseMounts(options.live, true, kGreets);
  const std::vector<LiveMount> alive = mounts ? *mounts : std::vector<LiveMount>();
  if (options.metrics) {
    fmt::print("{}", MetricsOf(scope, alive, records));
    return ExitWith(mounts ? 0 : static_cast<int>(ExitCode::kNotFound));
  }
  Json all = Json::array();
  for (const LiveMount& mount : alive) {
    CKPT_ASSIGN_OR_RETURN(Json json, AliveJson(mount, records));
    if (options.verbose) AddReaders(mount, json["status"]);
    all.push_back(std::move(json));
  }
  for (Json& dead : DeadMounts(scope.store, scope.mountpoint, alive, records)) {
    all.push_back(std::move(dead));
  }
  if (options.json && !all.empty()) PrintJson(all);
  if (!options.json) {
    for (const Json& mount : all) PrintMount(mount, options.verbose);
  }
  if (!mounts && all.empty()) return Fail(Error(mounts.error()));
  if (const Status asked = CheckSocketDirectory(); !asked) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(asked.error().message));
  }
  return ExitWith(mounts ? 0 : static_cast<int>(ExitCode::kNotFound));
}

}  // namespace

void AddStatusCommand(CommandSet& commands) {
  auto options = std::make_shared<StatusFlags>();
  Command& command = commands.Add("status",
                                  "Show whether mounts are alive, and what they have "
                                  "served");
  AddLiveOptions(command, options->live);
  command.Add("--verbose", options->verbose,
              "Every counter, how recent files were served, and who sees the step of /view");
  AddJsonOption(command, options->json);
  command.Add("--metrics", options->metrics, "Print numbers in the text format of Prometheus")
      .Excludes("--json");
  command.body = [options] { return RunStatus(*options); };
}

}  // namespace ckptfs
