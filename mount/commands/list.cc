// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>

#include "core/base/parallel.h"
#include "core/jobs/source_state.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct ListFlags {
  std::string run;
  std::string store;
  bool json = false;
};

SourceReport LookAt(Store& store, const StepRecord& record) {
  const auto step = store.Load(record);
  if (!step) return SourceReport{SourceState::kMissing, step.error().message};
  const auto blobs = BlobReader::Create((*step)->model, ReaderOptions());
  return LookAtSources((*step)->model, *blobs);
}

// Whether each step's files are what was adopted.
std::vector<SourceReport> LookAtAll(Store& store, const std::vector<StepRecord>& records) {
  std::vector<SourceReport> states(records.size());
  ParallelFor(records.size(), [&](size_t i) { states[i] = LookAt(store, records[i]); });
  return states;
}

void PrintTable(const std::vector<StepRecord>& records, const std::vector<SourceReport>& states) {
  size_t width = 4;
  for (const StepRecord& record : records) {
    width = std::max(width, record.run.size() + record.id.size() + 1);
  }
  for (size_t i = 0; i < records.size(); ++i) {
    const StepRecord& record = records[i];
    const std::string step = record.run + "/" + record.id;
    const bool sound = states[i].state == SourceState::kSound;
    fmt::print("{:<{}}  {:>10}  {}  {}{}{}\n", Printable(step), static_cast<int>(width),
               record.iteration, LocalTime(record.mtime_ns), Printable(record.source),
               sound ? "" : "  ", sound ? "" : SourceStateName(states[i].state));
  }
}

Status RunList(const ListFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(std::vector<std::string> runs, store->Runs());
  if (!options.run.empty()) runs = {options.run};
  std::vector<StepRecord> records;
  for (const std::string& run : runs) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> steps, store->Steps(run));
    records.insert(records.end(), steps.begin(), steps.end());
  }
  const std::vector<SourceReport> states = LookAtAll(*store, records);
  if (!options.json) {
    PrintTable(records, states);
    return {};
  }
  nlohmann::json steps = nlohmann::json::array();
  for (size_t i = 0; i < records.size(); ++i) {
    steps.push_back(RecordJson(records[i]));
    steps.back()["state"] = SourceStateName(states[i].state);
    if (!states[i].reason.empty()) steps.back()["reason"] = states[i].reason;
  }
  PrintJson({{"store", store->directory()}, {"steps", steps}});
  return {};
}

}  // namespace

void AddListCommand(CommandSet& commands) {
  auto options = std::make_shared<ListFlags>();
  Command& command = commands.Add("list", "List runs and their steps");
  command.Add("RUN", options->run, "Only this run");
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunList(*options); };
}

}  // namespace ckptfs
