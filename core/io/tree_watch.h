// SPDX-License-Identifier: Apache-2.0
//
// TreeWatch waits for somebody to change a directory or what lies below it: by inotify on
// filesystems of this machine, where other machines may write by nothing but the time (a
// network filesystem tells only what this machine writes), and so where there are more directories
// than are watched.
//
// It is a hint, never proof: the waiting caller looks by itself from time to time.
//
// Thread safety: Wait by one thread; Wake by any.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

class TreeWatch {
 public:
  // The directory need not be there yet.  Errors: kExhausted without descriptors.
  static Result<TreeWatch> Create(std::string directory);

  // Until something below changed since the last call, `most` is over, or Wake; of changes
  // by polling none is heard.  BLOCKS.
  void Wait(std::chrono::milliseconds most);
  void Wake() const;
  // Changes are heard, as of the last Wait.
  bool hears() const { return hears_; }

 private:
  explicit TreeWatch(std::string directory) : directory_(std::move(directory)) {}
  // Watches what can be; nothing that is watched already is watched twice.
  void AddAll();
  void Drain();

  std::string directory_;
  Descriptor inotify_;
  Descriptor wake_;
  bool hears_ = false;
  bool stale_ = true;                      // there may be directories that are not watched
  std::pair<uint64_t, uint64_t> watched_;  // device and inode of the directory
};

}  // namespace ckptfs
