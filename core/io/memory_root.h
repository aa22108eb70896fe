// SPDX-License-Identifier: Apache-2.0
//
// MemoryRoot is a Storage in this process's memory.  A file is a rope: spans of
// bytes that somebody else owns, in order; the owner lives as long as the file is
// known or open.  A file written through the Storage is a rope of one span.  A file of
// one span can be mapped; a rope of several is read.
//
// Thread safety: all methods may be called concurrently; the bytes of a rope
// never change.
// Lifetime: files outlive their removal and the root.
// Units: bytes; a stamp's inode is a number that no other file of the process has.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/io/root.h"

namespace ckptfs {

class MemoryRoot final : public Storage {
 public:
  // `name` stands for a path in messages.
  explicit MemoryRoot(std::string name) : Storage(std::move(name), false) {}

  // kExists if the path is taken.
  Status Add(std::string_view path, std::vector<std::span<const std::byte>> rope,
             std::shared_ptr<const void> owner, const OwnerAndMode& access);

  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;
  Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) override;
  Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override;
  Status Remove(std::string_view path) override;

  struct Rope;  // a file's content

 private:
  class Writer;
  // `replace`: in place of one that is there; else kExists.
  Status Put(std::string_view path, std::shared_ptr<const Rope> rope, bool replace);

  bool HasFolder(std::string_view path) const EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<const Rope>, std::less<>> files_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
