// SPDX-License-Identifier: Apache-2.0

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/commands/step_access.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

struct SwitchFlags {
  LiveOptions live;
  std::string step;
};

Status RunSwitch(const SwitchFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseMounts(options.live));
  for (const LiveMount& mount : mounts) {
    CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(mount.store, false));
    CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(*store, options.step));
    const auto done = AskDaemon(mount, "switch", {{"run", record.run}, {"id", record.id}});
    if (!done) return Fail(Error(done.error()).WithContext(mount.mountpoint));
  }
  return {};
}

}  // namespace

void AddSwitchCommand(CommandSet& commands) {
  auto options = std::make_shared<SwitchFlags>();
  Command& command = commands.Add("switch", "Move /view of live mounts to another step");
  command.Add("STEP", options->step, "RUN/ID, or RUN/latest")
      .Required()
      .Check(Checked(ParseStepReference));
  AddLiveOptions(command, options->live);
  command.body = [options] { return RunSwitch(*options); };
}

}  // namespace ckptfs
