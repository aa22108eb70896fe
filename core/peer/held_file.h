// SPDX-License-Identifier: Apache-2.0
//
// HeldFile is one rank's file of a step in memory, read from wherever it is: this daemon's own
// shelf, a node that holds all of it, units of its stripe that nodes hold (missing ones are
// calculated from others), then the store, if it has it by now.  No byte is given out before its
// chunk's digest was compared; a place that gives wrong bytes is named in the log and not asked
// again.
//
// Thread safety: all methods may be called concurrently; no lock is held while a peer is asked.
// A row that is put together from units is made once for all who want it, and kept a while.
// Lifetime: keeps what is on the own shelf.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/loading_cache.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/parity.h"
#include "core/peer/peer_client.h"
#include "core/peer/peer_shelf.h"

namespace ckptfs {

// A row of a rank's file that was put together.
struct StripeKey {
  uint32_t rank = 0;
  uint64_t row = 0;
  bool operator==(const StripeKey&) const = default;
};
struct HashStripeKey {
  size_t operator()(const StripeKey& key) const {
    return static_cast<size_t>((key.row << 20 ^ key.rank) * 0x9e3779b97f4a7c15u);
  }
};
using StripeRow = std::shared_ptr<const std::vector<std::byte>>;  // bytes of the file

// Rows that were put together, shared by the files of a step: at most 64 MiB of them.
class StripeRows : public LoadingCache<StripeKey, StripeRow, HashStripeKey> {
 public:
  StripeRows()
      : LoadingCache(uint64_t{64} << 20, [](const StripeRow& row) { return row->size(); }) {}
};

class HeldFile {
 public:
  // Asks a node: `ask` is called with a link to it (PeerPool::Ask).
  using AskNode = std::function<Status(const Digest& node,
                                       const std::function<Status(PeerClient& client)>& ask)>;
  struct Places {
    const PeerShelf* shelf = nullptr;  // asked now, not later
    AskNode ask;
    std::shared_ptr<const Root> store;  // its blobs; may be null
    std::shared_ptr<StripeRows> rows = std::make_shared<StripeRows>();
    std::function<void(std::string_view line)> log;
  };
  // `record`: of any of its units, or of the whole file if units are not known.
  HeldFile(UnitRecord record, const HeldRank& held, Places places);

  const std::string& path() const { return path_; }  // below the store's blobs
  const PreparedRank& rank() const { return record_.rank(); }
  // Other nodes hold it now, perhaps.
  void Update(const HeldRank& held);
  // Fills `out` with whole chunks from `offset` on.  kDataLoss if no place has them.
  Status Fetch(uint64_t offset, std::span<std::byte> out) const;
  // Fills `out` with a unit's chunk, as ChunkBytesOf has it.  Likewise.
  Status FetchUnit(uint32_t unit, uint64_t row, std::span<std::byte> out) const;

 private:
  using Read = std::function<Status(std::span<std::byte> out)>;
  struct Held {
    std::vector<Digest> nodes;                      // of the whole file
    std::map<uint32_t, std::vector<Digest>> units;  // of its units
  };
  Held held() const;
  // Chunks that are asked for: the first one's number, and the digests of all.
  struct Wanted {
    uint64_t first = 0;
    std::span<const Digest> digests;
  };
  Wanted WantedOf(uint64_t offset, size_t bytes) const;
  // True if the place gave the right bytes; else `why` says what it did.
  bool Try(const std::string& place, const Read& read, const Wanted& wanted,
           std::span<std::byte> out, std::string& why) const;
  bool FetchWhole(const Held& held, uint64_t offset, std::span<std::byte> out,
                  std::string& why) const;
  bool FetchRows(const Held& held, uint64_t offset, std::span<std::byte> out,
                 std::string& why) const;
  // The chunk of a unit that somebody holds.
  bool ReadUnit(const Held& held, uint32_t unit, uint64_t row, std::span<std::byte> out,
                std::string& why) const;
  Result<StripeRow> RowOf(const Held& held, uint64_t row, std::string& why) const;
  Result<StripeRow> MakeRow(const Held& held, uint64_t row) const;
  Status RestoreInto(const Held& held, uint64_t row, std::set<uint32_t> missing,
                     std::vector<std::byte>& bytes, std::string why) const;

  const UnitRecord record_;
  const std::string directory_;
  const std::string path_;
  const Places places_;      // without the shelf
  PeerShelf::FilePtr mine_;  // null: it is not on the own shelf
  std::map<uint32_t, PeerShelf::FilePtr> my_units_;
  const std::optional<StripeCode> code_;  // of units that are known
  mutable Mutex mutex_;
  Held held_ GUARDED_BY(mutex_);
  mutable std::set<std::string> wrong_ GUARDED_BY(mutex_);  // places that gave wrong bytes
};

}  // namespace ckptfs
