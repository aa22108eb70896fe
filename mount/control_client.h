// SPDX-License-Identifier: Apache-2.0
//
// The commands' end of the control socket: which mounts are live, and asking
// one of them something.
//
// Thread safety: free functions without state.

#pragma once

#include <sys/types.h>

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/store/store.h"

namespace ckptfs {

struct LiveMount {
  std::string socket;
  std::string store;
  std::string mountpoint;
  pid_t pid = 0;
};

// This user's daemons on `store` (absolute; empty: on any); sockets that nobody
// listens to are removed.
std::vector<LiveMount> FindLiveMounts(std::string_view store);

// Ask and return the result as JSON text.  BLOCKS: until the daemon answers (a
// warm fills files first).
Result<std::string> AskDaemon(const LiveMount& mount, std::string_view operation,
                              const std::map<std::string, std::string>& arguments = {});

// Tell all daemons on `store` that it changed, and in which steps if those are
// known; failures are only worth a line.
std::vector<std::string> RefreshDaemons(std::string_view store,
                                        std::span<const StepRecord> steps = {});

}  // namespace ckptfs
