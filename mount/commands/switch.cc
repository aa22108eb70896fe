// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/fuse/mount_users.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct SwitchFlags {
  LiveOptions live;
  std::string step;
  bool json = false;
};

// A mount that is to show a step, which its store has.
struct Move {
  LiveMount mount;
  StepRecord to;
};

// The outcome: the step that /view showed before, and who still has files of it open.
nlohmann::json MoveOne(const Move& move, const std::string& reply) {
  const auto before = nlohmann::json::parse(reply, nullptr, false);
  const std::string to = StrCat(move.to.run, "/", move.to.id);
  std::string run, id;
  if (before.is_object()) {
    run = BytesOfUtf8(before.value("run", ""));
    id = BytesOfUtf8(before.value("id", ""));
  }
  const std::string from = run.empty() ? "" : StrCat(run, "/", id);
  nlohmann::json told = {{"mountpoint", move.mount.mountpoint}, {"from", nullptr}, {"to", to}};
  told["users"] = nlohmann::json::array();
  if (from.empty()) return told;
  told["from"] = from;
  if (from == to) return told;
  told["users"] =
      UsersJson(FindMountUsers(StrCat(move.mount.mountpoint, "/run/", run, "/step/", id)));
  return told;
}

void PrintMove(const nlohmann::json& told) {
  const std::string from = told["from"].is_string() ? told["from"].get<std::string>() : "nothing";
  const std::string to = told.value("to", "");
  fmt::print(
      "{}: /view: {}\n", Printable(told.value("mountpoint", "")),
      Printable(from == to ? StrCat(to, " (it showed that already)") : StrCat(from, " -> ", to)));
  for (const auto& user : told["users"]) {
    fmt::print("  {} (pid {}) goes on with {} of {}\n", Printable(user.value("name", "")),
               user.value("pid", 0), Counted(user["files"].size(), "file"), Printable(from));
  }
}

// A mount that follows goes on with it where the newest step is asked for, not a step by its name.
bool AsksForNewest(std::string_view step) {
  const size_t slash = step.find('/');
  return slash == std::string_view::npos || step.substr(slash + 1) == "latest";
}

Status RunSwitch(const SwitchFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseAnswering(options.live));
  std::vector<Move> moves;  // all of them can be made before the first is
  for (const LiveMount& mount : mounts) {
    CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(mount.store, false));
    CKPT_ASSIGN_OR_RETURN(StepRecord record, ResolveStep(*store, options.step));
    WarnIfGone(*store, record);
    moves.push_back({mount, std::move(record)});
  }
  nlohmann::json all = nlohmann::json::array();
  for (const Move& move : moves) {
    const std::string id = AsksForNewest(options.step) ? "latest" : move.to.id;
    const auto done = AskDaemon(move.mount, "switch", {{"run", move.to.run}, {"id", id}});
    if (!done) return Fail(Error(done.error()).WithContext(move.mount.mountpoint));
    all.push_back(MoveOne(move, *done));
    if (!options.json) PrintMove(all.back());
  }
  if (options.json) PrintJson(all);
  return {};
}

}  // namespace

void AddSwitchCommand(CommandSet& commands) {
  auto options = std::make_shared<SwitchFlags>();
  Command& command = commands.Add("switch", "Move /view of live mounts to another step");
  command.Add("STEP", options->step, "RUN/ID, or RUN/latest")
      .Required()
      .Offers(kOfferSteps)
      .Check(Checked(ParseStepReference));
  AddLiveOptions(command, options->live);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunSwitch(*options); };
}

}  // namespace ckptfs
