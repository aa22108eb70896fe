// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/mutex.h"
#include "core/base/names.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/daemon/adoption.h"
#include "mount/daemon/follow_service.h"
#include "mount/daemon/process_setup.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct AdoptFlags {
  AdoptRequest request;
  std::vector<std::string> paths;
  std::string store;
  bool link = false;
  bool copy = false;
  std::string pack = "auto";
  std::string check = "auto";
  bool json = false;
  bool watch = false;
  bool joined = false;  // --union

  // The directories of each place that is to be adopted.
  std::vector<std::vector<std::string>> Places() const {
    if (joined) return {paths};
    std::vector<std::vector<std::string>> places;
    for (const std::string& path : paths) places.push_back({path});
    return places;
  }
};

using Places = std::vector<std::vector<std::string>>;

void Ask(const std::vector<std::string>& place, AdoptRequest& request) {
  request.ingest.path = place.front();
  request.ingest.joined.assign(place.begin() + 1, place.end());
}

// For messages and JSON: "/a/run", "/a/run + /b/run".
std::string NameOf(const std::vector<std::string>& place) {
  std::string name = place.front();
  for (size_t i = 1; i < place.size(); ++i) name += StrCat(" + ", place[i]);
  return name;
}

// The outcome of one of the paths.
struct Outcome {
  std::string path;
  Result<AdoptReport> report;
};

// The errors of an outcome: one if nothing of the path was adopted.
std::vector<Error> ErrorsOf(const Outcome& outcome) {
  return outcome.report ? outcome.report->refused : std::vector<Error>{outcome.report.error()};
}

Json OutcomeJson(const Outcome& outcome) {
  Json steps = Json::array();
  Json refused = Json::array();
  if (outcome.report) {
    for (const StepRecord& record : outcome.report->steps) steps.push_back(RecordJson(record));
  }
  Json refusals = Json::array();
  for (const Error& error : ErrorsOf(outcome)) {
    refused.push_back(error.message);
    refusals.push_back(ErrorJson(error));
  }
  return {{"path", outcome.path},
          {"refusals", refusals},
          {"steps", steps},
          {"said", outcome.report ? outcome.report->said : std::vector<std::string>()},
          {"skipped", outcome.report ? outcome.report->skipped : std::vector<std::string>()},
          {"warnings", outcome.report ? outcome.report->warnings : std::vector<std::string>()},
          {"refused", refused}};
}

// All paths' steps and lines together, and those of each.
void PrintAsJson(const std::vector<Outcome>& outcomes) {
  Json all = Json::object();
  for (const char* key : {"steps", "skipped", "warnings", "refused", "refusals"})
    all[key] = Json::array();
  Json paths = Json::array();
  for (const Outcome& outcome : outcomes) {
    paths.push_back(OutcomeJson(outcome));
    for (auto& [key, list] : all.items()) {
      for (const Json& one : paths.back()[key]) list.push_back(one);
    }
  }
  all["paths"] = std::move(paths);
  PrintJson(all);
}

void PrintAsText(const Outcome& outcome) {
  if (!outcome.report) return;
  for (const StepRecord& record : outcome.report->steps) {
    fmt::print("{}/{}\n", Printable(record.run), Printable(record.id));
  }
}

void Complain(const std::string& line) { fmt::print(stderr, "ckptfs: {}\n", Printable(line)); }

void ComplainOf(const Outcome& outcome) {
  for (const Error& error : ErrorsOf(outcome)) Complain(error.message);
  if (!outcome.report) return;
  for (const std::string& line : outcome.report->said) Complain(line);
  for (const std::string& line : outcome.report->skipped) Complain(StrCat("skipped ", line));
  for (const std::string& line : outcome.report->warnings) Complain(line);
}

// The nodes of a job may each have a part of a save, which is not whole alone.
void ComplainOfParts(const std::vector<Outcome>& outcomes) {
  const auto failed = [](const Outcome& one) {
    return !one.report || !one.report->refused.empty() || !one.report->skipped.empty();
  };
  if (outcomes.size() < 2 || !std::ranges::any_of(outcomes, failed)) return;
  Complain(
      "if these directories together hold one save, as disks of a job's nodes do: "
      "`adopt --union` takes them as one");
}

void TellDaemons(const std::string& store, const std::vector<StepRecord>& adopted) {
  for (const std::string& line : RefreshDaemons(store, adopted)) {
    Complain(StrCat("a live mount was not told: ", line));
  }
}

// Steps as they are adopted, a line each, until a signal comes.
Status Watch(Store& store, AdoptRequest request, const AdoptFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor signals, SignalDescriptor());
  Mutex printing;
  FollowService::Hooks hooks;
  hooks.say = [](std::string_view line) { Complain(std::string(line)); };
  hooks.withdrawn = [&](const std::vector<StepRecord>& records) {
    TellDaemons(store.directory(), records);
  };
  hooks.adopted = [&](const std::vector<StepRecord>& records) {
    TellDaemons(store.directory(), records);
    const MutexLock lock(printing);
    for (const StepRecord& record : records) {
      fmt::print("{}\n", options.json ? RecordJson(record).dump(-1, ' ', false,
                                                                Json::error_handler_t::replace)
                                      : Printable(StrCat(record.run, "/", record.id)));
    }
    std::fflush(stdout);
  };
  std::vector<std::unique_ptr<FollowService>> follows;
  for (const std::string& path : options.paths) {
    request.ingest.path = path;
    CKPT_ASSIGN_OR_RETURN(follows.emplace_back(), FollowService::Create(store, request, hooks));
  }
  for (const auto& follow : follows) follow->Start();
  pollfd event{signals.get(), POLLIN, 0};
  while (::poll(&event, 1, -1) < 0 && errno == EINTR) {
  }
  for (const auto& follow : follows) follow->Stop();
  return {};
}

// The outcomes of paths that nothing was done with, since one of them cannot be
// adopted; none if all can.
std::vector<Outcome> CheckAll(const StoreForAdoption& store, AdoptRequest request,
                              const Places& places) {
  std::vector<Outcome> outcomes;
  bool sound = true;
  for (const auto& place : places) {
    Ask(place, request);
    const Status checked = CheckRequested(store.directory(), request);
    sound = sound && checked;
    outcomes.push_back(checked ? Outcome{NameOf(place), AdoptReport()}
                               : Outcome{NameOf(place), Fail(Error(checked.error()))});
  }
  if (sound) outcomes.clear();
  return outcomes;
}

std::vector<Outcome> AdoptAll(StoreForAdoption& store, AdoptRequest request, const Places& places) {
  std::vector<Outcome> outcomes;
  if (places.size() > 1) outcomes = CheckAll(store, request, places);
  if (!outcomes.empty()) {
    for (const Outcome& outcome : outcomes) ComplainOf(outcome);
    Complain(StrCat("nothing was adopted of ", places.size(), " paths"));
    ComplainOfParts(outcomes);
    return outcomes;
  }
  for (const auto& place : places) {
    Ask(place, request);
    outcomes.push_back(Outcome{NameOf(place), AdoptRequested(store, request)});
    ComplainOf(outcomes.back());
  }
  ComplainOfParts(outcomes);
  return outcomes;
}

Status RunAdopt(const AdoptFlags& options) {
  AdoptRequest request = options.request;
  if (options.link) request.ownership = Ownership::kLink;
  if (options.copy) request.ownership = Ownership::kCopy;
  request.pack = options.pack == "auto";
  request.check = options.check == "auto";
  CKPT_ASSIGN_OR_RETURN(const std::string directory, StorePath(options.store));
  StoreForAdoption store(directory);
  if (options.watch) {
    for (const std::string& path : options.paths) {  // before a store is made
      request.ingest.path = path;
      CKPT_RETURN_IF_ERROR(FollowService::Check(directory, request));
    }
    CKPT_ASSIGN_OR_RETURN(Store* const opened, store.Open());
    return Watch(*opened, std::move(request), options);
  }
  const std::vector<Outcome> outcomes = AdoptAll(store, request, options.Places());
  int code = 0;  // of the first error
  for (const Outcome& outcome : outcomes) {
    for (const Error& error : ErrorsOf(outcome)) {
      if (code == 0) code = static_cast<int>(ExitCodeOf(error.code));
    }
  }
  std::vector<StepRecord> adopted;
  for (const Outcome& outcome : outcomes) {
    if (!outcome.report) continue;
    adopted.insert(adopted.end(), outcome.report->steps.begin(), outcome.report->steps.end());
  }
  TellDaemons(directory, adopted);
  if (options.json) {
    PrintAsJson(outcomes);
  } else {
    for (const Outcome& outcome : outcomes) PrintAsText(outcome);
  }
  return ExitWith(code);
}

Result<bool> ParseAuto(const std::string& word) {
  if (word == "auto" || word == "never") return word == "auto";
  return Fail(ErrorCode::kInvalid, StrCat("'", word, "': must be auto or never"));
}

Result<std::string> ParseRequired(const std::string& word) {
  if (word == "optimizer") return word;
  return Fail(ErrorCode::kInvalid, StrCat("'", word, "': only `optimizer` can be required"));
}

}  // namespace

void AddAdoptCommand(CommandSet& commands) {
  auto options = std::make_shared<AdoptFlags>();
  Command& command = commands.Add("adopt", "Index a checkpoint; its files stay where they are");
  command.Add("PATH", options->paths, "A directory of runs, of one run, or of one step").Required();
  AddStoreOption(command, options->store);
  command.Add("--name", options->request.name, "Name of the run (default: the save directory's)")
      .Value("RUN")
      .Check(Checked([](const std::string& name) { return CheckName(name, "run"); }));
  AddIngestOptions(command, options->request.ingest);
  command.Add("--link", options->link,
              "Keep reflinks or hard links, in case the source is deleted");
  command.Add("--copy", options->copy, "Keep copies in the store").Excludes("--link");
  command
      .Add("--pack", options->pack,
           "Copy tensors in many small pieces into the store, or not (default: auto)")
      .Value("auto|never")
      .Check(Checked(ParseAuto));
  command
      .Add("--check", options->check,
           "Compare a sample of the weights with their masters, or not (default: auto)")
      .Value("auto|never")
      .Check(Checked(ParseAuto));
  command.Add("--require", options->request.require, "Refuse a step whose optimizer is not whole")
      .Value("optimizer")
      .Check(Checked(ParseRequired));
  command.Add("--refresh", options->request.refresh,
              "Replace steps that changed since they were adopted");
  command
      .Add("--watch", options->watch,
           "Adopt steps as a job saves them, until interrupted; prints each")
      .Excludes("--refresh");
  command
      .Add("--union", options->joined,
           "The PATHs together are one directory, whose files lie on several disks")
      .Excludes("--watch");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunAdopt(*options); };
}

}  // namespace ckptfs
