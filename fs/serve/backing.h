// SPDX-License-Identifier: Apache-2.0
//
// Backing is a descriptor the kernel may pass an open file's reads and
// mappings through to: a source file (direct) or a filled huge-page file
// (materialised).
//
// Thread safety: immutable.
// Lifetime: the descriptor stays open while the Backing is held.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fs/types.h"

namespace ckptfs {

class Backing {
 public:
  // `owner` closes or gives back `fd` when it goes.
  Backing(ServingMode mode, int fd, std::shared_ptr<const void> owner)
      : mode_(mode), fd_(fd), token_(next_token.fetch_add(1)), owner_(std::move(owner)) {}

  ServingMode mode() const { return mode_; }
  int fd() const { return fd_; }
  uint64_t token() const { return token_; }  // of this backing only, for ever

 private:
  static inline std::atomic<uint64_t> next_token{1};
  const ServingMode mode_;
  const int fd_;
  const uint64_t token_;
  const std::shared_ptr<const void> owner_;
};

}  // namespace ckptfs
