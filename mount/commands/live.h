// SPDX-License-Identifier: Apache-2.0
//
// Choosing among live mounts in the commands that talk to a daemon.
//
// Thread safety: used by the process's first thread only.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "mount/commands/command.h"
#include "mount/control/control_client.h"

namespace ckptfs {

struct LiveOptions {
  std::string store;
  std::string mountpoint;
};

void AddLiveOptions(Command& command, LiveOptions& options);

// The resolved options: the store whose daemons are meant (empty: any), the one mount.
struct LiveScope {
  std::string store;
  std::string mountpoint;
};
Result<LiveScope> ScopeOf(const LiveOptions& options);

// The mounts of the store (or the one at the mount point), and its daemons without a mount
// if `daemons`; never empty: kNotFound if none is live.  One that does not answer in time
// is left out.
Result<std::vector<LiveMount>> ChooseMounts(const LiveOptions& options, bool daemons = false,
                                            Patience patience = kGreeting);

// Its mounts; those that do not answer are named on standard error (kIo if none does).
Result<std::vector<LiveMount>> ChooseAnswering(const LiveOptions& options);

}  // namespace ckptfs
