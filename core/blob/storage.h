// SPDX-License-Identifier: Apache-2.0
//
// Storage is the seam under the store: named immutable byte runs.  It assumes
// no rename, append or partial overwrite, so that an object store fits.
//
// Names are '/'-separated relative paths without "." or ".." components.
//
// Thread safety: all methods may be called concurrently.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

struct StorageStat {
  uint64_t size = 0;
  int64_t mtime_ns = 0;
};

// One object being written, in order.  Destroying it without Close() leaves
// nothing behind under the final name.
class StorageWriter {
 public:
  virtual ~StorageWriter() = default;
  // BLOCKS: on the device.
  virtual Status Append(std::span<const std::byte> bytes) = 0;
  // The object exists, whole and durable, exactly when this returned success.
  virtual Status Close() = 0;
};

class Storage {
 public:
  virtual ~Storage() = default;

  // Create or replace `name` when the writer is closed.
  virtual Result<std::unique_ptr<StorageWriter>> Create(std::string_view name) = 0;
  // Fill `out` from `offset`; the count is short only at the end.
  virtual Result<size_t> ReadAt(std::string_view name, uint64_t offset,
                                std::span<std::byte> out) = 0;
  virtual Result<StorageStat> Stat(std::string_view name) = 0;
  // Create `name` with `bytes`, durably, or kExists if it is there already;
  // of several concurrent callers exactly one succeeds.
  virtual Status PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) = 0;
  // Names directly or indirectly below `prefix` (a folder), sorted.
  virtual Result<std::vector<std::string>> List(std::string_view prefix) = 0;
  virtual Status Remove(std::string_view name) = 0;
};

}  // namespace ckptfs
