// SPDX-License-Identifier: Apache-2.0
//
// WriteWatch tells whether host memory was written since it was begun, by whatever way of this
// process: through numpy, a raw pointer, a system call.  The kernel write-protects the pages,
// lets a write through and remembers it (userfaultfd's UFFD_FEATURE_WP_ASYNC, and PAGEMAP_SCAN;
// Linux 6.7).  Nobody's write fails or waits for us; the first one to a page costs a fault.
//
// Not watched: the first and the last page of a range unless all of it belongs to the range
// (others may write beside it); memory that changes without a write of this process (shared
// mappings, and private mappings of files); any memory where the kernel or a sandbox refuses.
// Covered() says what is.
//
// Thread safety: all methods may be called concurrently, also of watches of the same memory.
// Lifetime: the end lifts the protection that is left; so does the process's.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace ckptfs {

using HostBytes = std::span<const std::byte>;

class WriteWatch {
 public:
  // Begins to watch what is in `memory` now.  Null if nothing of it can be watched.
  static std::unique_ptr<WriteWatch> Begin(std::span<const HostBytes> memory);
  ~WriteWatch();
  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  // Returns the part of `bytes`, whole pages, whose writes are seen: empty
  // if it is not all watched.  REQUIRES: `bytes` was given to Begin.
  HostBytes Covered(HostBytes bytes) const;
  // Returns the first watched byte of `bytes` whose page was written (or unmapped).
  std::optional<const std::byte*> FindWritten(HostBytes bytes) const;
  // They were copied: their pages are not watched any more, and are written without a fault, where
  // no other watch needs them.  REQUIRES: nobody asks for them again.
  void Release(HostBytes bytes);
  // Says that nothing is asked any more.  The end lifts the protection, which takes longer.
  void Leave();

 private:
  class Kernel;
  struct Extent {  // addresses of whole pages
    uintptr_t begin = 0;
    uintptr_t end = 0;
  };
  explicit WriteWatch(Kernel* kernel) : kernel_(kernel) {}
  bool Overlaps(const Extent& extent) const;

  Kernel* const kernel_;  // the process's, which never ends
  // Under the kernel's mutex, after Begin:
  std::vector<Extent> extents_;  // rising, apart
  std::vector<Extent> written_;  // seen when another watch of the same memory began
  bool lifts_late_ = false;      // some of the memory was given twice
};

}  // namespace ckptfs
