// SPDX-License-Identifier: Apache-2.0
//
// FileStorage is Storage over a directory of a POSIX filesystem.  Objects are
// written to a temporary file under .tmp, synced, and given their name by one
// link or rename, after which the directories are synced: a name never shows
// less than a whole, durable object.
//
// What is read was written by root or by our own user, and nobody else may write
// it: the directory, those inside it on the way to an object, and the object are
// looked at as they are opened, and no link is followed (kPermission).
//
// Thread safety: all methods may be called concurrently, also by several
// processes on one directory.
// Units: bytes.

#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "core/blob/storage.h"

namespace ckptfs {

class FileStorage final : public Storage {
 public:
  // `directory` is created with mode 0700 (parents included) when `create`.
  // Leftovers of writers that died more than a day ago are removed.
  static Result<std::unique_ptr<FileStorage>> Open(const std::string& directory, bool create);

  Result<std::unique_ptr<StorageWriter>> Create(std::string_view name) override;
  Result<size_t> ReadAt(std::string_view name, uint64_t offset, std::span<std::byte> out) override;
  Result<StorageStat> Stat(std::string_view name) override;
  Status PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) override;
  Result<std::vector<std::string>> List(std::string_view prefix) override;
  Status Remove(std::string_view name) override;

  // Absolute path of an object, whether or not it exists.
  std::string PathOf(std::string_view name) const;
  const std::string& directory() const { return directory_; }

 private:
  explicit FileStorage(std::string directory) : directory_(std::move(directory)) {}
  std::string directory_;
};

// '/'-separated components, none of them empty, "." or ".."; kInvalid says which.
Status CheckStorageName(std::string_view name);

}  // namespace ckptfs
