// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/adoption.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_json.h"
#include "mount/control_client.h"

namespace ckptfs {
namespace {

struct Options {
  AdoptRequest request;
  std::string store;
  bool link = false;
  bool copy = false;
  std::string pack = "auto";
  bool json = false;
};

void Print(const AdoptOutcome& outcome, bool json) {
  if (json) {
    nlohmann::json steps = nlohmann::json::array();
    for (const StepRecord& record : outcome.steps) steps.push_back(RecordJson(record));
    PrintJson({{"steps", steps}, {"skipped", outcome.skipped}});
    return;
  }
  for (const StepRecord& record : outcome.steps) {
    std::printf("%s/%s\n", record.run.c_str(), record.id.c_str());
  }
}

Status Run(const Options& options) {
  AdoptRequest request = options.request;
  if (options.link) request.ownership = Ownership::kLink;
  if (options.copy) request.ownership = Ownership::kCopy;
  request.pack = options.pack == "auto";
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, true));
  CKPT_ASSIGN_OR_RETURN(const AdoptOutcome outcome, Adopt(*store, request));
  for (const std::string& line : outcome.skipped) {
    std::fprintf(stderr, "ckptfs: skipped %s\n", line.c_str());
  }
  for (const std::string& line : outcome.warnings) {
    std::fprintf(stderr, "ckptfs: %s\n", line.c_str());
  }
  for (const std::string& line : RefreshDaemons(store->directory())) {
    std::fprintf(stderr, "ckptfs: a live mount was not told: %s\n", line.c_str());
  }
  Print(outcome, options.json);
  return {};
}

}  // namespace

void AddAdoptCommand(CommandSet& commands) {
  auto options = std::make_shared<Options>();
  CLI::App* command = commands.Add("adopt", "Index a checkpoint; its files stay where they are");
  command->add_option("PATH", options->request.ingest.path, "A save directory, or one step's own")
      ->required();
  AddStoreOption(command, options->store);
  command->add_option("--name", options->request.name, "Name of the run (default: the save directory's)")
      ->type_name("RUN")
      ->check(Checked([](const std::string& name) { return CheckName(name, "run"); }));
  AddIngestOptions(command, options->request.ingest);
  CLI::Option* link = command->add_flag(
      "--link", options->link, "Keep reflinks or hard links, against deletion of the source");
  command->add_flag("--copy", options->copy, "Keep copies in the store")->excludes(link);
  command
      ->add_option("--pack", options->pack,
                   "Copy tensors in many small pieces into the store, or not (default: auto)")
      ->type_name("auto|never")
      ->check(CLI::IsMember({"auto", "never"}).description(""));
  AddJsonOption(command, options->json);
  commands.SetBody(command, [options] { return Run(*options); });
}

}  // namespace ckptfs
