// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/adoption.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_json.h"
#include "mount/control_client.h"
#include "mount/printable.h"

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
    std::printf("%s/%s\n", Printable(record.run).c_str(), Printable(record.id).c_str());
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
    std::fprintf(stderr, "ckptfs: skipped %s\n", Printable(line).c_str());
  }
  for (const std::string& line : outcome.warnings) {
    std::fprintf(stderr, "ckptfs: %s\n", Printable(line).c_str());
  }
  for (const std::string& line : RefreshDaemons(store->directory())) {
    std::fprintf(stderr, "ckptfs: a live mount was not told: %s\n", Printable(line).c_str());
  }
  Print(outcome, options.json);
  return {};
}

Result<bool> ParsePack(const std::string& word) {
  if (word == "auto" || word == "never") return word == "auto";
  return Fail(ErrorCode::kInvalid, StrCat("'", word, "': auto or never"));
}

}  // namespace

void AddAdoptCommand(CommandSet& commands) {
  auto options = std::make_shared<Options>();
  Command& command = commands.Add("adopt", "Index a checkpoint; its files stay where they are");
  command.Add("PATH", options->request.ingest.path, "A save directory, or one step's own")
      .Required();
  AddStoreOption(command, options->store);
  command.Add("--name", options->request.name, "Name of the run (default: the save directory's)")
      .Value("RUN")
      .Check(Checked([](const std::string& name) { return CheckName(name, "run"); }));
  AddIngestOptions(command, options->request.ingest);
  command.Add("--link", options->link,
              "Keep reflinks or hard links, against deletion of the source");
  command.Add("--copy", options->copy, "Keep copies in the store").Excludes("--link");
  command
      .Add("--pack", options->pack,
           "Copy tensors in many small pieces into the store, or not (default: auto)")
      .Value("auto|never")
      .Check(Checked(ParsePack));
  AddJsonOption(command, options->json);
  command.body = [options] { return Run(*options); };
}

}  // namespace ckptfs
