// SPDX-License-Identifier: Apache-2.0
//
// Where the daemons of a user have their sockets: /run/ckptfs for root, else
// $XDG_RUNTIME_DIR/ckptfs or /tmp/ckptfs-UID (0700).
//
//   <hash of store>-<hash of mount point>.sock   control (mount/control/control_protocol.h)
//   <hash of store>-<hash of mount point>.json   the daemon (mount/control/daemon_record.h)
//   <hash of store>.snapshots                    snapshots (snapshot/wire/protocol.h)
//   <hash of store>.snapshots.lock               held by the daemon that receives them
//
// Thread safety: pure functions (the environment is read).

#pragma once

#include <sys/un.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

// Created when `create`.  kPermission, with what it is, unless it is a directory that only this
// user can write.
Result<std::string> SocketDirectory(bool create);

// kPermission if a directory is there that is not this user's alone: no daemon can be found.
Status CheckSocketDirectory();

// The directory of a store's sockets.  `store` is its absolute path without links.
std::string StoreSocketName(std::string_view store);

// kInvalid if the path is too long for one.
Result<sockaddr_un> SocketAddress(const std::string& path);

// The process that made a Unix connection, as a pidfd; none where the kernel has no name for it
// (another pid namespace).
Descriptor PeerProcess(int connection);

// When that process began, since boot and rounded up to what the kernel counts in (10 ms); nothing
// where that cannot be known.
std::optional<std::chrono::nanoseconds> PeerBirth(int connection);
std::chrono::nanoseconds TimeSinceBoot();

// True if the other side of a Unix connection is this user or root, as the kernel says.
bool IsPeerTrusted(int connection);

}  // namespace ckptfs
