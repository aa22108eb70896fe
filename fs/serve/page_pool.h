// SPDX-License-Identifier: Apache-2.0
//
// PagePool lends files on a private tmpfs of huge pages (a detached mount with
// huge=always) and keeps idle ones with their pages: first-touch page faults
// cost more than filling.  Only pages that no reader was given are used again.
//
// A file's length is exactly what was asked for, because passthrough reads end
// at the length of the backing file; bytes between it and the end of its last
// page are zero.
//
// Thread safety: all methods may be called concurrently; no lock is held
// across system calls that touch pages.
// Lifetime: the pool must outlive nothing: a file is a descriptor of its own.
// Units: bytes; charges are multiples of 2 MiB.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/result.h"

namespace ckptfs {

inline constexpr uint64_t kHugePage = uint64_t{2} << 20;

class PagePool {
 public:
  // One lent file.  `fd` is open for reading and writing; contents are
  // unspecified.
  struct File {
    Descriptor fd;
    uint64_t size = 0;
    uint64_t charge = 0;  // counted against the budget
  };

  // kPermission or kUnsupported when the kernel or our privileges do not allow
  // a tmpfs of huge pages.
  static Result<std::unique_ptr<PagePool>> Create(uint64_t budget);

  // A file of `size` bytes.  kExhausted if it does not fit beside the files
  // that are lent; idle ones make room.
  Result<File> Take(uint64_t size);
  // Takes it back with its pages.  REQUIRES: no reader ever had it: a pipe or a
  // socket can hold pages that nobody has open or mapped any more.
  void Give(File file);
  // A file of this size may be taken soon: somebody looked at it.  `file` is any number of
  // its own; of many the last kMostExpected are remembered, in the order of the first looks.
  void Expect(uint64_t file, uint64_t size);
  void ExpectNoMore(uint64_t file);
  static constexpr size_t kMostExpected = 64;
  // Add an idle file of at most `size` bytes (a multiple of kHugePage) with its
  // pages touched, so that its taker does not fault them.  Returns its size: less if
  // `stop` was true or somebody takes a file, 0 if it does not fit beside what
  // is lent and idle.
  // BLOCKS: on page faults, 0.04-1.5 s per GiB; asks `stop` every 64 MiB.
  uint64_t Prepare(uint64_t size, const std::function<bool()>& stop);
  // Ends the file: its pages are freed when the last mapping goes.
  void Discard(File file);

  // True if somebody else has the file open or mapped: its pages would not be
  // freed.  A mapping made by passthrough outlives the release of the file it
  // was made through.  REQUIRES: nobody can open it now.
  static bool IsMapped(const File& file);

  uint64_t budget() const { return budget_; }
  uint64_t lent_bytes() const;
  uint64_t idle_bytes() const;
  struct Idle {
    size_t files = 0;
    uint64_t bytes = 0;
    uint64_t last_taken = 0;              // charge of the file taken last; 0: none yet
    std::vector<uint64_t> expected = {};  // charges
  };
  Idle idle() const;

 private:
  struct Expected {
    uint64_t file = 0;
    uint64_t charge = 0;
  };

  PagePool(Descriptor mount, uint64_t budget) : mount_(std::move(mount)), budget_(budget) {}
  // Picks an idle file to use again and makes room in the accounts; the files
  // that had to go are appended to `freed`.  False if there is no room.
  bool Reserve(uint64_t charge, File* reused, std::vector<File>* freed);
  // Waits while files are prepared; false if none were.
  bool AwaitPrepared();
  Result<File> NewFile() const;

  const Descriptor mount_;
  const uint64_t budget_;
  std::atomic<unsigned> takers_{0};  // in Take now
  mutable Mutex mutex_;
  CondVar prepared_;
  unsigned preparing_ GUARDED_BY(mutex_) = 0;
  std::vector<File> idle_ GUARDED_BY(mutex_);
  uint64_t lent_ GUARDED_BY(mutex_) = 0;
  uint64_t idle_bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t last_taken_ GUARDED_BY(mutex_) = 0;
  std::deque<Expected> expected_ GUARDED_BY(mutex_);
};

// The machine's or our control group's memory, whichever is less.
uint64_t MemoryToUse();
// The bytes that may be lent: as asked for, or a quarter of `memory` if that is 0, and
// never more than leaves room for the rest of the daemon (three quarters).  A memory
// group that is full ends the daemon, and with it the mount.
uint64_t MaterialiseBudget(uint64_t asked, uint64_t memory);

}  // namespace ckptfs
