// SPDX-License-Identifier: Apache-2.0
//
// The commands' end of the control socket: which mounts are live, and asking
// one of them something.
//
// Thread safety: free functions without state.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "core/store/store.h"
#include "mount/control/daemon_record.h"

namespace ckptfs {

struct LiveMount {
  std::string socket;
  std::string store;
  std::string mountpoint;
  pid_t pid = 0;
  std::string hf_config = {};  // the directory of its --hf-config; empty without it
  std::string version = {};    // of its program; empty: one that does not say
  uint64_t generation = 0;     // how many programs served the mount before
  bool ingest = false;         // jobs save there, and it shows no views
};

// How long to wait for an answer; 0: for ever.
using Patience = std::chrono::milliseconds;
inline constexpr Patience kGreeting = std::chrono::seconds(5);
inline constexpr Patience kAnswer = std::chrono::seconds(60);  // it may look at its store first

// This user's daemons on `store` (absolute; empty: on any) that answer; sockets that nobody
// listens to are removed.
std::vector<LiveMount> FindLiveMounts(std::string_view store, Patience patience = kGreeting);

// Those that live and are not among the ones that answered: stopped, or stuck.
std::vector<DaemonFacts> SilentDaemons(std::string_view store, std::span<const LiveMount> answered);
// "MOUNTPOINT: its daemon (pid 7) does not answer"
std::string DescribeSilent(const DaemonFacts& daemon);

// Ask and return the result as JSON text.  BLOCKS: until the daemon answers (a
// warm fills files first).
Result<std::string> AskDaemon(const LiveMount& mount, std::string_view operation,
                              const std::map<std::string, std::string>& arguments = {},
                              Patience patience = kAnswer);

// A connection that answers as step_answers.h says, of a step that the daemon has in
// memory.  kNotFound if it has none such.
Result<Descriptor> OpenReader(const LiveMount& mount, const std::string& run, const std::string& id,
                              const std::string& layout);

// Tell all daemons on `store` that it changed, and in which steps if those are
// known; failures are only worth a line.
std::vector<std::string> RefreshDaemons(std::string_view store,
                                        std::span<const StepRecord> steps = {});

}  // namespace ckptfs
