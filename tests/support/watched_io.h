// SPDX-License-Identifier: Apache-2.0
//
// WatchedIo records what the code under test asks of the operating system and
// can make the n-th call fail.  It sees the calls that the linker redirects
// (--wrap, in tests/core/io/CMakeLists.txt): opendir, readdir, stat, lstat, fstat,
// fstatat, readlinkat and pread (preadv2 finds nothing in memory), and of what writes pwrite,
// fsync, rename, link and mkdir; of code linked statically into the program, on any thread.
//
// Thread safety: one at a time exists; the calls may come from any thread.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ckptfs {

struct SystemCall {
  std::string name;     // "pread"
  std::string path;     // of the file or directory
  uint64_t offset = 0;  // pread, pwrite: what was asked for, bytes
  uint64_t length = 0;
};

class WatchedIo {
 public:
  enum class Faults { kOne, kFromThereOn };
  // From now on; the `fail_at`-th call (1 is the first, 0: none) gives EIO, or it and all
  // that follow it do.
  explicit WatchedIo(uint64_t fail_at = 0, Faults faults = Faults::kOne);
  ~WatchedIo();
  WatchedIo(const WatchedIo&) = delete;
  WatchedIo& operator=(const WatchedIo&) = delete;

  // A pwrite writes no more than this.
  void WriteAtMost(uint64_t bytes);

  std::vector<SystemCall> calls() const;
  // The call that failed first, if it came to that.
  std::optional<SystemCall> failed() const;
};

}  // namespace ckptfs
