// SPDX-License-Identifier: Apache-2.0
//
// Root is the seam over a tree of files: a directory, objects below a prefix,
// memory.  Storage is a Root that can also be written; the store is one.
//
// A path is '/'-separated plain names (CheckPlainPath); the empty path is the root
// itself, for List and Stat only.
//
// Rules for all: nothing assumes rename, append or partial overwrite.  An object
// appears whole or not at all; PublishIfAbsent is the one step that is atomic
// between writers.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: files outlive their Root and the removal of their name.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

enum class EntryKind { kFile, kDirectory, kOther };

struct RootEntry {
  std::string name;  // one component
  EntryKind kind = EntryKind::kOther;
  std::string link = {};  // of a symbolic link: what it says
};

struct EntryStat {
  EntryKind kind = EntryKind::kOther;
  FileStamp stamp = {};
  OwnerAndMode access = {};  // without ACLs, unless a link led here
  bool linked = false;
  std::vector<OwnerAndMode> searched = {};  // of a linked file: directories from the first link on
};

class Root {
 public:
  virtual ~Root() = default;
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  // For messages, without a '/' at its end; of local files the absolute path.
  const std::string& name() const { return name_; }
  virtual std::string PathOf(std::string_view path) const;
  // A directory of this machine: names are its paths, and files can be mapped.
  bool local() const { return local_; }

  // Lists a directory, sorted by name.  A link counts as what it leads to, or as kOther
  // where it leads to nothing that we can see.
  virtual Result<std::vector<RootEntry>> List(std::string_view path) const = 0;
  // kNotFound if there is nothing; links count as what they lead to.
  virtual Result<EntryStat> Stat(std::string_view path) const = 0;
  // kInvalid if it is not a file.  BLOCKS: as opening does, never on a fifo.
  virtual Result<std::shared_ptr<const File>> Open(std::string_view path) const = 0;

 protected:
  Root(std::string name, bool local) : name_(std::move(name)), local_(local) {}

 private:
  const std::string name_;
  const bool local_;
};

// One object being written.  Without Close() there is never anything under its
// name.
class StorageWriter {
 public:
  virtual ~StorageWriter() = default;
  // The object will have `bytes`: a directory puts them aside, so that writing them neither
  // runs out of space nor waits for each other.  kExhausted if there are not as many.
  virtual Status Reserve(uint64_t bytes) = 0;
  // A part of the object.  Parts may come in any order and from several threads.  A
  // directory takes large parts of whole pages, from memory that begins at a page, past
  // the page cache.
  // REQUIRES: when it is closed they cover [0, size) once, where `size` is what was
  // reserved if anything was.
  // BLOCKS: on the device.
  virtual Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) = 0;
  // The object exists, whole and durable, exactly when this returned success.
  virtual Status Close() = 0;
};

class Storage : public Root {
 public:
  // Create or replace `path` when the writer is closed.  The storage must outlive
  // the writer.
  virtual Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) = 0;
  // Create `path` with `bytes`, durably, or kExists if it is there already; of
  // several concurrent callers exactly one succeeds.
  virtual Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) = 0;
  // kNotFound if there is no such file.
  virtual Status Remove(std::string_view path) = 0;

 protected:
  using Root::Root;
};

// Plain names with '/' between them: none of them empty, "." or "..", no NUL;
// kInvalid says which path is not.
Status CheckPlainPath(std::string_view path);

// Stat of what has to be a file; else kInvalid.
Result<EntryStat> StatFile(const Root& root, std::string_view path);

// Stats `path`; nothing if there is nothing that we can see: no such name, a link that
// leads nowhere or where we may not go.  A device that fails is an error, so that no
// checkpoint ever seems smaller than it is, or gone.
Result<std::optional<EntryStat>> StatIfThere(const Root& root, std::string_view path);
Result<bool> HasDirectory(const Root& root, std::string_view path);
Result<bool> HasFile(const Root& root, std::string_view path);

// A directory of a root, as a root of its own.
std::shared_ptr<const Root> RootBelow(std::shared_ptr<const Root> root, std::string directory);

// `directory` and `name` with a '/' between them; one of them may be empty.
std::string JoinPath(std::string_view directory, std::string_view name);
// The directory that a path lies in: "" for a name of the root itself.
std::string ParentPath(std::string_view path);
// The last name of a path.
std::string LastComponent(std::string_view path);

// The files directly or indirectly below a directory, by path, sorted; none if
// the directory does not exist.
Result<std::vector<std::string>> ListFilesBelow(const Root& root, std::string_view directory);

// All bytes of a file; kInvalid above `limit`.
Result<std::string> ReadWhole(const Root& root, std::string_view path, uint64_t limit);

// The same, mapped where that can be.
// REQUIRES: nobody shortens the file (one of our own): touching it is not guarded.
class WholeFile {
 public:
  static Result<WholeFile> Open(const Root& root, std::string_view path, uint64_t limit);
  std::string_view text() const;

 private:
  std::shared_ptr<const Mapping> mapping_;
  std::string bytes_;  // if it is not mapped
};

}  // namespace ckptfs
