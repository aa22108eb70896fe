// SPDX-License-Identifier: Apache-2.0
//
// Spool is a directory of this node's own disk in which saves wait for their store: what one
// daemon has of a save, whole and durable, with the names that it will have in the store.
//
//   format                                    record: of which store it is the spool
//   snapshots/<digest>/rank-<N>.safetensors   the files (PreparedPart::PathOf)
//   prepared/<name>                           record: they are all there (RenderPart), of
//                                             FlatPartName with no node
//   .tmp/*                                    a file that is being written
//
// A save is there exactly while its record is: that is published after the files, and goes
// before them.  A save of ranks that are all here has a random life, so that no two have
// the same names.
//
// Thread safety: all methods may be called concurrently, for different saves.
// Lifetime: files that are open outlive their removal and the spool.
// Inputs are hostile: a directory that somebody else could have written to, or that holds anything
// else, is refused with file and rule before anything in it is read or changed.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/records/commit_records.h"

namespace ckptfs {

struct OpenedSpool;

class Spool {
 public:
  // `directory`: absolute; made with mode 0700 if it is not there.  `store`: its `format` record.
  // kExists if another process has it; kPermission, kInvalid if it cannot be a spool of this store.
  static Result<OpenedSpool> Open(const std::string& directory, const std::string& store);
  // Over any storage, of which nobody else is a user.
  static Result<OpenedSpool> OpenOn(std::shared_ptr<Storage> storage, const std::string& store);

  // The saves in it, oldest first, whoever is using it; nothing of another store's.
  // BLOCKS: on the disk.
  static Result<std::vector<PreparedPart>> Look(const Storage& storage, const std::string& store);

  // Makes the save durable.  kDataLoss if its bytes are not what the part says; kExhausted if
  // there is no room.  A failed one leaves nothing, or what the next Open removes.
  // BLOCKS: on the disk.
  Status Write(const PreparedPart& part, const Root& bytes);
  // If this fails, the next Open of the spool removes what is left.
  Status Remove(const PreparedPart& part);
  // Where the files of saves are.
  const std::shared_ptr<Storage>& files() const { return storage_; }

 private:
  explicit Spool(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}
  Status Claim(const std::string& store);
  Result<std::vector<PreparedPart>> TakeStock(std::vector<std::string>& notes);
  Status RemoveFiles(const PreparedPart& part);

  const std::shared_ptr<Storage> storage_;
  std::unique_ptr<const FileLock> lock_;  // null: it is not a directory
};

struct OpenedSpool {
  std::unique_ptr<Spool> spool;
  std::vector<PreparedPart> left;  // by an earlier daemon; oldest first
  std::vector<std::string> notes;  // removed files, each with the reason
};

// Bytes of a save's files.
uint64_t BytesOf(const PreparedPart& part);

}  // namespace ckptfs
