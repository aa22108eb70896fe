// SPDX-License-Identifier: Apache-2.0
//
// Functions that set up a daemon's process before it serves: signals, descriptors, its log.
//
// Thread safety: REQUIRES the process's first thread, before it starts others.

#pragma once

#include <string>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

// Backing files and mapped sources want many descriptors.
void RaiseDescriptorLimit();

// In a child of a process with threads: system calls only.
void CloseAllDescriptors();

// SIGINT, SIGTERM and SIGHUP as a descriptor; blocked before any thread starts, so that
// none of them ends a thread in the middle of something.
Result<Descriptor> SignalDescriptor();

// Where a daemon logs once the terminal is gone: `log` if it is given, else a file in the
// store named after `name` (whose directory is made); "syslog" if that cannot be.
std::string LogTarget(const std::string& log, const std::string& store, std::string name);
// Stays where it is if that cannot be.
void MoveLog(const std::string& target);
// A named log must be writable before the terminal is gone; its directory is not made.
Status CheckLog(const std::string& log);

}  // namespace ckptfs
