// SPDX-License-Identifier: Apache-2.0
//
// Filesystems of this machine's own, on which no other machine writes: what the kernel says of
// their files (events, leases) is all that happens to them.
//
// Thread safety: pure functions.

#pragma once

#include <string>

namespace ckptfs {

bool IsLocalFilesystem(const std::string& path);
bool IsLocalFilesystem(int descriptor);

}  // namespace ckptfs
