// SPDX-License-Identifier: Apache-2.0
//
// Functions that set up a daemon's process before it serves: signals, descriptors, its log.
//
// Thread safety: REQUIRES the process's first thread, before it starts others.

#pragma once

#include <string>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "mount/daemon/configuration.h"
#include "mount/daemon/snapshot_service.h"
#include "mount/logging.h"

namespace ckptfs {

// Backing files and mapped sources want many descriptors.
void RaiseDescriptorLimit();

// In a child of a process with threads: system calls only.
void CloseAllDescriptors();

// Success if the mount answers.  Another process asks, which has none of our files: a thread that
// waits for its own process's answer cannot be killed, and would keep the mount and itself for
// good. May be called by any thread, with others about.
Status AskMount(const std::string& mountpoint);

// SIGINT, SIGTERM, SIGHUP and SIGUSR1 as a descriptor; blocked before any thread starts, so that
// none of them ends a thread in the middle of something.
Result<Descriptor> SignalDescriptor();
// Does what the signal that is to be read asks for: SIGHUP opens the log anew and reads the
// configuration file again, SIGUSR1 only the former.  Returns true if the daemon is to end, which
// SIGHUP asks for where it stands in the foreground of a terminal.
bool ObeySignal(int signals, Configuration& configuration);

// The log's format and the retention policy, which mounts and other daemons may change while they
// serve.  `log`: LogTarget's answer.
void AllowSharedChanges(Configuration& configuration, const std::string& log,
                        SnapshotService& snapshots);

// Where a daemon logs once the terminal is gone: `log` if it is given, else a file in the
// store named after `name` (whose directory is made); "syslog" if that cannot be.
std::string LogTarget(const std::string& log, const std::string& store, std::string name);
// Stays where it is if that cannot be.
void MoveLog(const std::string& target, LogFormat format);
// A named log must be writable before the terminal is gone; its directory is not made.
Status CheckLog(const std::string& log);

}  // namespace ckptfs
