// SPDX-License-Identifier: Apache-2.0
//
// PeerShelf is the memory in which a daemon keeps rank files of steps, or units of them: its own
// ranks', so that a step outlives its arenas, and those of other nodes.  One is there once its
// digests have been compared with its record; from then on nobody can write it (a sealed memfd).
//
// Thread safety: all methods may be called concurrently; a ShelfFile is filled by one thread.
// Lifetime: files outlive their removal and the shelf; their room is free when the last user
// lets go.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/io/sealed_memory.h"
#include "core/peer/peer_protocol.h"
#include "core/records/commit_records.h"

namespace ckptfs {

class PeerShelf;

inline constexpr size_t kMostShelvedFiles = 8192;  // a list of them fits into a frame

class ShelfFile {
 public:
  ~ShelfFile();
  ShelfFile(const ShelfFile&) = delete;
  ShelfFile& operator=(const ShelfFile&) = delete;

  const UnitRecord& record() const { return record_; }
  const PreparedPart& part() const { return record_.part; }
  // Of the whole file.
  const PreparedRank& rank() const { return record_.rank(); }
  // REQUIRES: it is not shelved yet.
  std::span<std::byte> room() const { return memory_.room(); }
  // REQUIRES: it is shelved.
  std::span<const std::byte> bytes() const { return memory_.bytes(); }

 private:
  friend class PeerShelf;
  ShelfFile(UnitRecord record, SealedMemory memory, std::shared_ptr<std::atomic<uint64_t>> used)
      : record_(std::move(record)), memory_(std::move(memory)), used_(std::move(used)) {}
  const UnitRecord record_;
  SealedMemory memory_;
  const std::shared_ptr<std::atomic<uint64_t>> used_;
};

class PeerShelf {
 public:
  using FilePtr = std::shared_ptr<const ShelfFile>;
  explicit PeerShelf(uint64_t budget, size_t most_files = kMostShelvedFiles)
      : budget_(budget), most_files_(most_files) {}

  // Makes room for a file.  kExhausted if there is not as much, or too many files are held;
  // kInvalid for one without a byte; kExists if it is shelved with the same record, or with another
  // one.  REQUIRES: the record's part has one rank.
  Result<std::unique_ptr<ShelfFile>> Begin(UnitRecord record);
  // Shelves a file that is filled.  kDataLoss if its bytes are not those of its record.
  Status Shelve(std::unique_ptr<ShelfFile> file);

  // Null if it is not shelved.
  FilePtr Find(std::string_view directory, uint32_t rank, uint32_t slot = 0) const;
  // False if it is not shelved.
  bool Protect(std::string_view directory, uint32_t rank, uint32_t slot = 0);
  bool Remove(std::string_view directory, uint32_t rank, uint32_t slot = 0);
  std::vector<ShelvedPart> List() const;
  uint64_t used() const { return *used_; }
  uint64_t budget() const { return budget_; }

 private:
  using Name = std::tuple<std::string, uint32_t, uint32_t>;  // directory, rank, slot
  struct Entry {
    FilePtr file;
    ShelvedState state = ShelvedState::kHeld;
  };

  const uint64_t budget_;
  const size_t most_files_;
  const std::shared_ptr<std::atomic<uint64_t>> used_ = std::make_shared<std::atomic<uint64_t>>(0);
  mutable Mutex mutex_;
  std::map<Name, Entry> entries_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
