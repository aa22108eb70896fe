// SPDX-License-Identifier: Apache-2.0
//
// FileStorage is Storage over a directory of a POSIX filesystem.  Objects are
// written to a temporary file under .tmp, synced, and given their name by one
// link or rename, after which the directories are synced: a name never shows
// less than a whole, durable object.
//
// Every object that is read was written by root or by our own user, and nobody else may
// write it.  The directory, those inside it on the way to an object, and the object are
// checked as they are opened, and no link is followed (kPermission).
//
// Thread safety: all methods may be called concurrently, also by several
// processes on one directory.
// Units: bytes.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/io/root.h"

namespace ckptfs {

class FileStorage final : public Storage {
 public:
  // `directory` is created with mode 0700 (parents included) when `create`.
  // Leftovers of writers that died are removed.
  static Result<std::unique_ptr<FileStorage>> Open(const std::string& directory, bool create);
  // A writer that lives holds its file (flock); without locks nothing is a leftover.
  static void RemoveLeftovers(const std::string& directory);
  // Removes an object that nothing needs, and the directory that it was the last of.  If the
  // machine stops it may be there again.
  static void Discard(const std::string& directory, std::string_view name);
  // Another name in the same folder for an object, durably and at once: on a full filesystem,
  // too, where nothing can be published.  kNotFound if there is no such object.
  static Status Rename(const std::string& directory, std::string_view from, std::string_view to);

  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;
  Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) override;
  Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override;
  Status Remove(std::string_view path) override;

  const std::string& directory() const { return name(); }

 private:
  explicit FileStorage(std::string directory) : Storage(std::move(directory), true) {}
};

}  // namespace ckptfs
