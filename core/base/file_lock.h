// SPDX-License-Identifier: Apache-2.0
//
// FileLock holds an open file or directory with an flock on it, which ends with
// the process, on whichever machine it runs.
//
// Thread safety: immutable.

#pragma once

#include <memory>
#include <string>
#include <utility>

#include "core/base/descriptor.h"

namespace ckptfs {

class FileLock {
 public:
  // Locks `path`, opened with `flags` and not through a link, as `operation` (of
  // flock) says.  Null if it is not there, is locked otherwise, or was replaced
  // meanwhile.  A filesystem without locks gives none that is exclusive; a
  // shared one only keeps others out, so that is given all the same.
  // BLOCKS: on another's lock, without LOCK_NB.
  static std::unique_ptr<const FileLock> Take(const std::string& path, int flags, int operation);

  explicit FileLock(Descriptor file) : file_(std::move(file)) {}
  int fd() const { return file_.get(); }

 private:
  const Descriptor file_;
};

}  // namespace ckptfs
