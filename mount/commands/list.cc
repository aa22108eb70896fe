// SPDX-License-Identifier: Apache-2.0

#include <cstdio>

#include "mount/commands/command_set.h"
#include "mount/commands/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct Options {
  std::string run;
  std::string store;
  bool json = false;
};

void PrintTable(const std::vector<StepRecord>& records) {
  size_t width = 4;
  for (const StepRecord& record : records) {
    width = std::max(width, record.run.size() + record.id.size() + 1);
  }
  for (const StepRecord& record : records) {
    const std::string step = record.run + "/" + record.id;
    std::printf("%-*s  %10llu  %s  %s\n", static_cast<int>(width), Printable(step).c_str(),
                static_cast<unsigned long long>(record.iteration),
                LocalTime(record.mtime_ns).c_str(), Printable(record.source).c_str());
  }
}

Status Run(const Options& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(std::vector<std::string> runs, store->Runs());
  if (!options.run.empty()) runs = {options.run};
  std::vector<StepRecord> records;
  for (const std::string& run : runs) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> steps, store->Steps(run));
    records.insert(records.end(), steps.begin(), steps.end());
  }
  if (!options.json) {
    PrintTable(records);
    return {};
  }
  nlohmann::json steps = nlohmann::json::array();
  for (const StepRecord& record : records) steps.push_back(RecordJson(record));
  PrintJson({{"store", store->directory()}, {"steps", steps}});
  return {};
}

}  // namespace

void AddListCommand(CommandSet& commands) {
  auto options = std::make_shared<Options>();
  Command& command = commands.Add("list", "List runs and their steps");
  command.Add("RUN", options->run, "Only this run");
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return Run(*options); };
}

}  // namespace ckptfs
