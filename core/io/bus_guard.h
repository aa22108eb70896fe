// SPDX-License-Identifier: Apache-2.0
//
// RunGuarded turns the bus error of a mapped file that shrank (or whose device
// failed) into a return value.  The process-wide SIGBUS handler is installed at
// the first use and passes every signal that is not ours on to the handler
// that was there before.
//
// Thread safety: may be called concurrently; guards nest per thread.

#pragma once

#include <cstddef>

namespace ckptfs {

// Runs function(context).  Returns true if it came back, false if a bus error
// ended it; then *fault_address is where.
// REQUIRES: while it touches mapped bytes `function` holds no lock and owns no
// resource: its frames are left without destructors.
bool RunGuarded(void (*function)(void*), void* context, const std::byte** fault_address);

}  // namespace ckptfs
