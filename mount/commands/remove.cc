// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/commands/command_set.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/fuse/mount_users.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

struct RemoveFlags {
  std::vector<std::string> steps;
  std::string store;
  bool force = false;
  bool json = false;
};

// A step by its own name: what `latest` means may change meanwhile.
Result<StepReference> ParseOneStep(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(StepReference name, ParseStepReference(text));
  if (name.id != "latest") return name;
  return Fail(Error{ErrorCode::kInvalid, StrCat(text, ": name the step to remove")}.Needing(
      StrCat("`ckptfs resolve ", ShellWord(name.run), "` names the latest step")));
}

// A step that is to go, and whom that meets.
struct Removal {
  StepRecord record;
  std::vector<std::string> shown;  // mount points whose /view shows it
  std::vector<MountUser> users;    // files of it that are open go on
  std::vector<std::string> tags;   // that go with it

  std::string name() const { return StrCat(record.run, "/", record.id); }
};

// The step that /view of the mount shows; nothing if there is none, or the daemon cannot say.
std::string ShownBy(const LiveMount& mount) {
  const auto text = AskDaemon(mount, "shown", {}, kGreeting);
  const auto shown = text ? nlohmann::json::parse(*text, nullptr, false) : nlohmann::json();
  if (!shown.is_object()) return "";
  return BytesOfUtf8(StrCat(shown.value("run", ""), "/", shown.value("id", "")));
}

void LookAtMounts(const std::vector<LiveMount>& mounts, std::vector<Removal>& removals) {
  for (const LiveMount& mount : mounts) {
    if (mount.mountpoint.empty()) continue;
    const std::string shown = ShownBy(mount);
    for (Removal& removal : removals) {
      if (removal.name() == shown) removal.shown.push_back(mount.mountpoint);
      const auto users = FindMountUsers(
          StrCat(mount.mountpoint, "/run/", removal.record.run, "/step/", removal.record.id));
      removal.users.insert(removal.users.end(), users.begin(), users.end());
    }
  }
}

// Everything that can be wrong is found before the first step goes.
Result<std::vector<Removal>> CheckAll(Store& store, const RemoveFlags& options) {
  std::vector<Removal> removals;
  for (const std::string& text : options.steps) {
    CKPT_ASSIGN_OR_RETURN(const StepReference name, ParseOneStep(text));
    CKPT_ASSIGN_OR_RETURN(StepRecord record, store.Resolve(name.run, name.id));
    const bool again = std::any_of(removals.begin(), removals.end(), [&](const Removal& one) {
      return one.record.run == record.run && one.record.id == record.id;
    });
    if (!again) removals.push_back(Removal{std::move(record), {}, {}, {}});
  }
  const std::vector<LiveMount> mounts = FindLiveMounts(store.directory());
  LookAtMounts(mounts, removals);
  for (const DaemonFacts& daemon : SilentDaemons(store.directory(), mounts)) {
    if (options.force || daemon.mountpoint.empty()) continue;
    return Fail(ErrorCode::kExists, StrCat(DescribeSilent(daemon),
                                           ", so that nothing tells which "
                                           "step it "
                                           "shows. Nothing was removed; --force removes "
                                           "nevertheless"));
  }
  for (Removal& removal : removals) {
    CKPT_ASSIGN_OR_RETURN(const auto tags, store.Tags(removal.record.run));
    for (const StepTag& tag : tags) {
      if (tag.id == removal.record.id) removal.tags.push_back(tag.name);
    }
    if (removal.tags.empty() || options.force) continue;
    return Fail(
        Error{ErrorCode::kExists, StrCat("Nothing was removed. ", removal.name(), " has the tag '",
                                         removal.tags.front(), "'")}
            .Needing(StrCat("run `ckptfs tag --delete ",
                            ShellWord(StrCat(removal.record.run, "/", removal.tags.front())),
                            "` first, or give --force")));
  }
  for (const Removal& removal : removals) {
    if (removal.shown.empty() || options.force) continue;
    return Fail(Error{ErrorCode::kExists, StrCat("Nothing was removed. ", removal.name(),
                                                 ": /view of ", removal.shown.front(), " shows it")}
                    .Needing("run `ckptfs switch RUN/ID` first, or give --force"));
  }
  return removals;
}

nlohmann::json RemovalJson(const Removal& removal) {
  nlohmann::json json = RecordJson(removal.record);
  json["shown_by"] = removal.shown;
  json["users"] = UsersJson(removal.users);
  return json;
}

void PrintRemoval(const Removal& removal) {
  fmt::print("removed {}\n", Printable(removal.name()));
  for (const std::string& mountpoint : removal.shown) {
    fmt::print("  /view of {} shows nothing now\n", Printable(mountpoint));
  }
  if (removal.users.empty()) return;
  fmt::print("  its open files stay readable: {}\n", Printable(DescribeUsers(removal.users)));
}

// Live mounts and side blobs follow; what fails of that is worth a line.
void TellOthers(Store& store, const std::vector<StepRecord>& gone) {
  for (const std::string& line : RefreshDaemons(store.directory(), gone)) {
    fmt::print(stderr, "ckptfs: a live mount was not told: {}\n", Printable(line));
  }
  if (const Status swept = store.Sweep(); !swept) {
    fmt::print(stderr, "ckptfs: side blobs of removed steps stay: {}\n",
               Printable(swept.error().message));
  }
}

Status RunRemove(const RemoveFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const std::vector<Removal> removals, CheckAll(*store, options));
  Status done;
  std::vector<StepRecord> gone;
  nlohmann::json removed = nlohmann::json::array();
  for (const Removal& removal : removals) {
    done = store->Remove(removal.record);
    if (!done) break;
    // Where there is no room they stay, and name a step that is gone.
    for (const std::string& tag : removal.tags) (void)store->Untag(removal.record.run, tag);
    gone.push_back(removal.record);
    removed.push_back(RemovalJson(removal));
    if (!options.json) PrintRemoval(removal);
  }
  TellOthers(*store, gone);
  if (options.json) PrintJson({{"removed", removed}});
  return done;
}

}  // namespace

void AddRemoveCommand(CommandSet& commands) {
  auto options = std::make_shared<RemoveFlags>();
  Command& command =
      commands.Add("remove", "Forget steps; an adopted checkpoint's own files are not touched");
  command.Add("STEP", options->steps, "RUN/ID")
      .Required()
      .Offers(kOfferSteps)
      .Check(Checked(ParseOneStep));
  AddStoreOption(command, options->store);
  command.Add("--force", options->force, "Also a step that /view of a live mount shows");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunRemove(*options); };
}

}  // namespace ckptfs
