// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <thread>

#include "core/base/strings.h"
#include "core/records/node_presence.h"
#include "core/store/collect.h"
#include "mount/commands/command_set.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct GcFlags {
  std::string store;
  std::string run;
  Retention retention;
  bool dry_run = false;
  bool json = false;
};

nlohmann::json StepsJson(const std::vector<StepRecord>& records) {
  nlohmann::json steps = nlohmann::json::array();
  for (const StepRecord& record : records) steps.push_back(RecordJson(record));
  return steps;
}

void PrintSteps(const char* label, const std::vector<StepRecord>& records) {
  for (const StepRecord& record : records) {
    fmt::print("{} {}/{}\n", label, Printable(record.run), Printable(record.id));
  }
}

void PrintReport(const CollectReport& report, bool dry_run) {
  PrintSteps(dry_run ? "would remove" : "removed", report.removed);
  PrintSteps("in use, goes with a later gc:", report.held);
  fmt::print("{} {} in {}, and {}\n", dry_run ? "would reclaim" : "reclaimed",
             HumanBytes(report.bytes), Counted(report.directories, "directory", "directories"),
             Counted(report.manifests, "manifest"));
}

// Again until it is known of every daemon that has left something whether it still works.
Result<CollectReport> CollectWatching(Store& store, const CollectRequest& request) {
  CKPT_ASSIGN_OR_RETURN(CollectReport report, store.Collect(request));
  for (bool said = false; report.watched != 0 && !request.dry_run; said = true) {
    if (!said) {
      fmt::print(stderr, "ckptfs: checking whether {} daemons of other machines still work\n",
                 report.watched);
    }
    std::this_thread::sleep_for(kBeat / 2);
    CKPT_ASSIGN_OR_RETURN(CollectReport more, store.Collect(request));
    report.removed.insert(report.removed.end(), more.removed.begin(), more.removed.end());
    report.held = std::move(more.held);
    report.notes = std::move(more.notes);
    report.manifests += more.manifests;
    report.directories += more.directories;
    report.bytes += more.bytes;
    report.watched = more.watched;
  }
  return report;
}

Status RunGc(const GcFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  const std::vector<LiveMount> mounts = FindLiveMounts(store->directory());
  CollectRequest request;
  if (!options.run.empty()) request.run = options.run;
  request.keep_last = options.retention.keep_last;
  request.keep_every = options.retention.keep_every;
  request.dry_run = options.dry_run;
  request.let_go = [&](const StepRecord& record) {
    for (const LiveMount& mount : mounts) {
      // One that does not answer keeps the step: it is found to be in use.
      (void)AskDaemon(mount, "let_go", {{"run", record.run}, {"id", record.id}});
    }
  };
  CKPT_ASSIGN_OR_RETURN(const CollectReport report, CollectWatching(*store, request));
  for (const std::string& note : report.notes) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(note));
  }
  if (!options.dry_run && !report.removed.empty()) {
    for (const std::string& line : RefreshDaemons(store->directory(), report.removed)) {
      fmt::print(stderr, "ckptfs: a live mount was not told: {}\n", Printable(line));
    }
  }
  if (!options.json) {
    PrintReport(report, options.dry_run);
    return {};
  }
  PrintJson({{"removed", StepsJson(report.removed)},
             {"in_use", StepsJson(report.held)},
             {"manifests", report.manifests},
             {"directories", report.directories},
             {"bytes", report.bytes},
             {"notes", report.notes}});
  return {};
}

}  // namespace

void AddGcCommand(CommandSet& commands) {
  auto options = std::make_shared<GcFlags>();
  Command& command =
      commands.Add("gc",
                   "Remove old steps that the store owns, and reclaim files that no step "
                   "needs");
  AddStoreOption(command, options->store);
  command.Add("--run", options->run, "Remove steps of this run only").Value("RUN");
  AddRetentionOptions(command, options->retention);
  command.Add("--dry-run", options->dry_run, "Only say what would be removed");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunGc(*options); };
}

}  // namespace ckptfs
