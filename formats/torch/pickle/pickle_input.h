// SPDX-License-Identifier: Apache-2.0
//
// PickleInput is where a pickle's bytes come from: all of them in memory, or a file of
// which a window is in memory.
//
// Thread safety: none.
// Lifetime: the bytes or the file must outlive it; a view that was taken is valid until
// the next call.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

class PickleInput {
 public:
  explicit PickleInput(std::string_view bytes) : window_(bytes), size_(bytes.size()) {}
  explicit PickleInput(const File& file) : file_(&file), size_(file.size()) {}

  uint64_t size() const { return size_; }
  uint64_t position() const { return begin_ + at_; }

  // The next `length` bytes; kInvalid if there are not as many.  BLOCKS: on reading a file.
  Result<std::string_view> Take(uint64_t length) {
    if (length > window_.size() - at_) CKPT_RETURN_IF_ERROR(Refill(length));
    const std::string_view taken = window_.substr(at_, length);
    at_ += length;
    return taken;
  }

  // Up to the next newline, which is passed; a carriage return before it is dropped.
  Result<std::string_view> TakeLine();

 private:
  Status Refill(uint64_t length);

  const File* file_ = nullptr;
  std::string buffer_;       // of a file
  std::string_view window_;  // bytes [begin_, ...) of the pickle
  uint64_t begin_ = 0;
  size_t at_ = 0;  // in the window
  uint64_t size_;
};

}  // namespace ckptfs
