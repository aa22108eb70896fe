// SPDX-License-Identifier: Apache-2.0
//
// RunWorkList runs the items of a bulk job (export, verify) on a few threads:
// items are claimed in order, the first error stops the rest, progress is
// reported from the calling thread.
//
// Thread safety: `work` is called concurrently; `progress` never is.
// Lifetime: all threads have ended when it returns.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/base/result.h"

namespace ckptfs {

struct JobProgress {
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  uint64_t items_done = 0;
  uint64_t items_total = 0;
};

struct JobOptions {
  unsigned threads = 0;                              // 0: one per core, at least 2
  std::function<void(const JobProgress&)> progress;  // a few times a second and at the end
};

// `work(i)` returns the bytes it dealt with.  BLOCKS: until all is done.
Status RunWorkList(size_t items, uint64_t bytes_total, const JobOptions& options,
                   const std::function<Result<uint64_t>(size_t)>& work);

}  // namespace ckptfs
