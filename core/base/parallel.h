// SPDX-License-Identifier: Apache-2.0
//
// ParallelFor spreads independent pieces of work over oneTBB's threads.  All
// of the program's data parallelism goes through it, so that ThreadSanitizer,
// which cannot see into oneTBB, is told in one place what that orders.
//
// Thread safety: may be called concurrently, and from inside `work`.

#pragma once

#include <cstddef>
#include <functional>

namespace ckptfs {

// Calls work(i) once for each i in [0, count), in no order, and returns when
// all calls have.  Every call sees what the caller wrote before; the caller sees what
// the calls wrote afterwards; calls are not ordered to each other.
// REQUIRES: `work` throws nothing and holds no lock that another call waits for.
void ParallelFor(size_t count, const std::function<void(size_t)>& work);

}  // namespace ckptfs
