// SPDX-License-Identifier: Apache-2.0
//
// MappedFile is a read-only mapping of a file of our own store, for as long as
// it lives.  Store files are never truncated by us; do not use it for files of
// others (BlobReader guards those).
//
// Thread safety: immutable.
// Lifetime: owns the mapping.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

class MappedFile {
 public:
  static Result<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  std::string_view bytes() const { return {static_cast<const char*>(address_), size_}; }

 private:
  MappedFile(void* address, size_t size) : address_(address), size_(size) {}
  void* address_;
  size_t size_;
};

}  // namespace ckptfs
