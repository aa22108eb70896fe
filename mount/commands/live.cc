// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/live.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/fuse/mount_table.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

// kPermission if somebody else's daemon serves the mount there.
Status CheckOwnMount(const std::string& mountpoint) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, MountpointPath(mountpoint));
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(path));
  if (!entry || entry->type != "fuse.ckptfs") return {};
  const auto user = UserOf(*entry);
  if (!user || *user == ::geteuid() || IsDeadMount(path)) return {};
  return Fail(
      ErrorCode::kPermission,
      StrCat(path, ": user ", *user, " mounted it; its daemon answers that user's commands"));
}

// Keeps those that answer and are meant.
Result<std::vector<LiveMount>> ChooseOf(std::vector<LiveMount> mounts, const LiveOptions& options,
                                        const LiveScope& scope, bool daemons) {
  bool ingests = false;
  if (!daemons) {
    std::erase_if(mounts, [&](const LiveMount& mount) {
      ingests = ingests || (mount.ingest && mount.mountpoint == scope.mountpoint);
      return mount.mountpoint.empty() || mount.ingest;
    });
  }
  if (!scope.mountpoint.empty()) {
    std::erase_if(mounts,
                  [&](const LiveMount& mount) { return mount.mountpoint != scope.mountpoint; });
  }
  if (!mounts.empty()) return mounts;
  if (ingests) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(scope.mountpoint,
                       ": jobs save there (`ckptfs ingest`), and it shows no "
                       "views: name a mount of the store"));
  }
  if (!options.mountpoint.empty()) {
    CKPT_RETURN_IF_ERROR(CheckOwnMount(options.mountpoint));
  }
  CKPT_RETURN_IF_ERROR(CheckSocketDirectory());  // else there are none, as far as one can ask
  return Fail(ErrorCode::kNotFound, options.mountpoint.empty()
                                        ? StrCat("no live mount of the store ", scope.store)
                                        : StrCat("no live mount at ", options.mountpoint));
}

}  // namespace

void AddLiveOptions(Command& command, LiveOptions& options) {
  AddStoreOption(command, options.store);
  command.Add("--mountpoint", options.mountpoint, "Only the mount there").Value("DIR");
}

Result<LiveScope> ScopeOf(const LiveOptions& options) {
  LiveScope scope;
  if (options.mountpoint.empty() || !options.store.empty()) {
    CKPT_ASSIGN_OR_RETURN(scope.store, StorePath(options.store));
  }
  if (!options.mountpoint.empty()) {
    CKPT_ASSIGN_OR_RETURN(scope.mountpoint, MountpointPath(options.mountpoint));
  }
  return scope;
}

Result<std::vector<LiveMount>> ChooseMounts(const LiveOptions& options, bool daemons,
                                            Patience patience) {
  CKPT_ASSIGN_OR_RETURN(const LiveScope scope, ScopeOf(options));
  return ChooseOf(FindLiveMounts(scope.store, patience), options, scope, daemons);
}

Result<std::vector<LiveMount>> ChooseAnswering(const LiveOptions& options) {
  CKPT_ASSIGN_OR_RETURN(const LiveScope scope, ScopeOf(options));
  const std::vector<LiveMount> answered = FindLiveMounts(scope.store);
  auto mounts = ChooseOf(answered, options, scope, false);
  for (const DaemonFacts& daemon : SilentDaemons(scope.store, answered)) {
    const bool asked = scope.mountpoint.empty() ? !daemon.mountpoint.empty()
                                                : daemon.mountpoint == scope.mountpoint;
    if (!asked) continue;
    if (!mounts) return Fail(ErrorCode::kIo, DescribeSilent(daemon));
    fmt::print(stderr, "ckptfs: {}\n", Printable(DescribeSilent(daemon)));
  }
  return mounts;
}

}  // namespace ckptfs
