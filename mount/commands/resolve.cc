// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>

#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct ResolveFlags {
  std::string run;
  std::string id = "latest";
  std::string store;
  bool json = false;
};

Status RunResolve(const ResolveFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  // Shells complete a directory of the name with a slash.
  const std::string run = options.run.substr(0, options.run.find_last_not_of('/') + 1);
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, store->Resolve(run, options.id));
  WarnIfGone(*store, record);
  if (options.json) {
    PrintJson(RecordJson(record));
  } else {
    fmt::print("{}\n", Printable(record.id));
  }
  return {};
}

}  // namespace

void AddResolveCommand(CommandSet& commands) {
  auto options = std::make_shared<ResolveFlags>();
  Command& command = commands.Add("resolve", "Print the one id that `latest` means now");
  command.Add("RUN", options->run, "The run").Required().Offers(kOfferRuns);
  command.Add("ID", options->id, "latest (the default), or an id to check").Offers(kOfferIds);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunResolve(*options); };
}

}  // namespace ckptfs
