// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/control_client.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct RemoveFlags {
  std::vector<std::string> steps;
  std::string store;
};

// A step by its own name: what `latest` means may change meanwhile.
Result<StepReference> ParseOneStep(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(StepReference name, ParseStepReference(text));
  if (name.id != "latest") return name;
  return Fail(ErrorCode::kInvalid, StrCat(text, ": name the step to remove; `ckptfs resolve ",
                                          name.run, "` says which is the latest"));
}

Result<StepRecord> RemoveOne(Store& store, const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const StepReference name, ParseOneStep(text));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, store.Resolve(name.run, name.id));
  CKPT_RETURN_IF_ERROR(store.Remove(record));
  return record;
}

Status RunRemove(const RemoveFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  Status done;
  std::vector<StepRecord> gone;
  for (const std::string& step : options.steps) {
    auto removed = RemoveOne(*store, step);
    if (!removed) {
      done = Fail(std::move(removed).error());
      break;
    }
    gone.push_back(*std::move(removed));
  }
  for (const std::string& line : RefreshDaemons(store->directory(), gone)) {
    fmt::print(stderr, "ckptfs: a live mount was not told: {}\n", Printable(line));
  }
  if (const Status swept = store->Sweep(); !swept) {
    fmt::print(stderr, "ckptfs: side blobs of removed steps stay: {}\n",
               Printable(swept.error().message));
  }
  return done;
}

}  // namespace

void AddRemoveCommand(CommandSet& commands) {
  auto options = std::make_shared<RemoveFlags>();
  Command& command =
      commands.Add("remove", "Forget steps; an adopted checkpoint's own files are not touched");
  command.Add("STEP", options->steps, "RUN/ID").Required().Check(Checked(ParseOneStep));
  AddStoreOption(command, options->store);
  command.body = [options] { return RunRemove(*options); };
}

}  // namespace ckptfs
