// SPDX-License-Identifier: Apache-2.0
//
// FaultPoint marks where a test may end the process, as a machine that takes it away: builds
// with tests kill it at the n-th point that it reaches if CKPTFS_KILL_AT is n; others
// do not look.
//
// Thread safety: may be called concurrently.

#pragma once

namespace ckptfs {

void FaultPoint();

}  // namespace ckptfs
