// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "core/store/lives.h"
#include "mount/commands/command_set.h"
#include "mount/commands/held_steps.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct RenameFlags {
  std::string run;
  std::string name;
  std::string store;
  bool json = false;
};

Status InUse(const RenameFlags& options, const std::string& why, const std::string& remedy) {
  return Fail(
      Error{ErrorCode::kExists, StrCat("run '", options.run, "' keeps its name: ", why)}.Needing(
          remedy));
}

Json Ask(const LiveMount& mount, const char* operation) {
  const auto text = AskDaemon(mount, operation, {}, kGreeting);
  return text ? Json::parse(*text, nullptr, false) : Json();
}

// The paths of the run that a mount gives to others, or writes.
Status CheckMount(const RenameFlags& options, const LiveMount& mount) {
  const Json shown = mount.mountpoint.empty() ? Json() : Ask(mount, "shown");
  if (shown.is_object() && BytesOfUtf8(shown.value("run", "")) == options.run) {
    return InUse(options, StrCat("/view of ", mount.mountpoint, " shows a step of it"),
                 StrCat("`ckptfs umount ", ShellWord(mount.mountpoint),
                        "`, or `ckptfs switch` to another run, first"));
  }
  const Json status = Ask(mount, "status");
  if (!status.is_object()) return {};
  for (const Json& follow : status.value("following", Json::array())) {
    if (!follow.is_object() || BytesOfUtf8(follow.value("run", "")) != options.run) continue;
    return InUse(options,
                 StrCat("the mount at ", mount.mountpoint, " adopts steps of ",
                        follow.value("path", ""), " into it"),
                 StrCat("`ckptfs umount ", ShellWord(mount.mountpoint), "` first"));
  }
  return {};
}

// A job that saves into a run of snapshots names it by itself.
Status CheckJobs(Store& store, const RenameFlags& options, const std::vector<LiveMount>& mounts) {
  const HeldSteps held = FindHeldSteps(store.directory());
  const std::string begin = StrCat(options.run, "/");
  const bool saves =
      std::ranges::any_of(held.steps, [&](const auto& one) { return one.run() == options.run; }) ||
      std::ranges::any_of(held.waiting, [&](const auto& line) { return line.starts_with(begin); });
  if (saves) return InUse(options, "steps of it are being saved", "wait until they are stored");
  const auto steps = store.Steps(options.run);
  const bool snapshots = steps && std::ranges::any_of(*steps, [](const StepRecord& step) {
                           return step.root.starts_with(kSnapshotRoot);
                         });
  for (const LiveMount& mount : mounts) {
    const Json status = snapshots ? Ask(mount, "status") : Json();
    if (!status.is_object() || !status.contains("snapshots")) continue;
    if (!status["snapshots"].is_object() || status["snapshots"].value("ranks", 0) == 0) continue;
    return InUse(options, "a job is connected that may save into it", "end the job first");
  }
  return {};
}

Status RunRename(const RenameFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  const std::vector<LiveMount> mounts = FindLiveMounts(store->directory());
  for (const DaemonFacts& daemon : SilentDaemons(store->directory(), mounts)) {
    return InUse(options, StrCat(DescribeSilent(daemon), ", so that nothing tells what it uses"),
                 "end it first");
  }
  for (const LiveMount& mount : mounts) CKPT_RETURN_IF_ERROR(CheckMount(options, mount));
  CKPT_RETURN_IF_ERROR(CheckJobs(*store, options, mounts));
  CKPT_ASSIGN_OR_RETURN(const uint64_t moved, store->RenameRun(options.run, options.name));
  for (const std::string& line : RefreshDaemons(store->directory())) {
    fmt::print(stderr, "ckptfs: a live mount was not told: {}\n", Printable(line));
  }
  if (options.json) {
    PrintJson({{"run", options.name}, {"before", options.run}, {"steps", moved}});
  } else {
    fmt::print("{} -> {} ({})\n", Printable(options.run), Printable(options.name),
               Counted(moved, "step"));
  }
  return {};
}

}  // namespace

void AddRenameCommand(CommandSet& commands) {
  auto options = std::make_shared<RenameFlags>();
  Command& command = commands.Add("rename", "Give a run another name");
  const auto name = Checked([](const std::string& text) { return CheckName(text, "run"); });
  command.Add("RUN", options->run, "The run").Required().Offers(kOfferRuns).Check(name);
  command.Add("NAME", options->name, "Its new name").Required().Offers(kOfferNothing).Check(name);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunRename(*options); };
}

}  // namespace ckptfs
