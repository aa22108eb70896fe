// SPDX-License-Identifier: Apache-2.0
//
// PageReserve keeps some memory of a pool touched before anybody opens a file:
// on the path of an open, first-touch page faults would cost more than the
// filling.  A thread of the lowest priority prepares idle files: for files that
// somebody looked at, and, once files are opened, such as were opened
// last, as the next rank's are.  It works while no file is read, since a restart
// needs the processors, and takes only memory that is free, never the page
// cache's.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the pool must outlive it.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "core/base/worker.h"
#include "fs/serve/page_pool.h"

namespace ckptfs {

// The size to prepare next so that idle files come to `reserve` bytes; 0: none.
uint64_t NextToPrepare(uint64_t reserve, const PagePool::Idle& idle);

class PageReserve {
 public:
  // `activity` is a number that grows while the mount is used.
  PageReserve(PagePool& pool, uint64_t bytes, std::function<uint64_t()> activity);
  ~PageReserve();
  PageReserve(const PageReserve&) = delete;
  PageReserve& operator=(const PageReserve&) = delete;

  uint64_t bytes() const { return bytes_; }
  // True if nothing is missing, or no memory is free for it.
  bool settled() const;

 private:
  Worker::Time Turn();
  void PrepareAll();

  PagePool& pool_;
  const uint64_t bytes_;
  const std::function<uint64_t()> activity_;
  std::atomic<bool> no_room_{false};
  uint64_t before_ = 0;  // the activity when the last turn ended
  Worker worker_;        // last: it uses all others
};

// A third of `budget`, at most 8 GiB.
uint64_t DefaultReserve(uint64_t budget);

}  // namespace ckptfs
