// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct TagFlags {
  std::string step;
  std::string name;
  std::string store;
  bool remove = false;
  bool json = false;
};

Status RunTag(const TagFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  if (options.remove) {
    if (!options.name.empty()) {
      return RefuseUsage("`tag --delete RUN/NAME` takes one word");
    }
    CKPT_ASSIGN_OR_RETURN(const StepReference tag, ParseStepReference(options.step));
    CKPT_RETURN_IF_ERROR(store->Untag(tag.run, tag.id));
    if (options.json) PrintJson({{"run", tag.run}, {"deleted", tag.id}});
    return {};
  }
  if (options.name.empty()) return RefuseUsage("which name is the step to have?");
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(*store, options.step));
  CKPT_RETURN_IF_ERROR(store->Tag(record, options.name));
  if (options.json) {
    nlohmann::json json = RecordJson(record);
    json["tag"] = options.name;
    PrintJson(json);
  } else {
    fmt::print("{}/{}: {}/{}\n", Printable(record.run), Printable(options.name),
               Printable(record.run), Printable(record.id));
  }
  return {};
}

}  // namespace

void AddTagCommand(CommandSet& commands) {
  auto options = std::make_shared<TagFlags>();
  Command& command = commands.Add("tag", "Give a step another name, which keeps it");
  command.Add("STEP", options->step, "RUN/ID, or RUN/latest; with --delete RUN/NAME")
      .Required()
      .Offers(kOfferSteps)
      .Check(Checked(ParseStepReference));
  command.Add("NAME", options->name, "The name")
      .Offers(kOfferNothing)
      .Check(Checked([](const std::string& text) { return CheckName(text, "tag"); }));
  AddStoreOption(command, options->store);
  command.Add("--delete", options->remove, "The step has the name no more");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunTag(*options); };
}

}  // namespace ckptfs
