// SPDX-License-Identifier: Apache-2.0
//
// BlockCache is the page cache of files that cannot be mapped: aligned blocks, of
// which the ones used last are kept within a bound of bytes.  Blocks that are
// asked for in one call and are not there are fetched at once: neighbours in one
// ReadAt of at most 16 blocks, many of those in flight; a block that somebody is
// fetching already is waited for.
//
// Thread safety: all methods may be called concurrently; no lock is held while a
// block is fetched.
// Lifetime: blocks are shared and outlive their being dropped.
// Units: bytes; block k of a file is [k * block(), (k + 1) * block()), the last one
// shorter.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/base/digest.h"
#include "core/base/lru.h"
#include "core/base/result.h"
#include "core/base/single_flight.h"
#include "core/io/file.h"
#include "core/io/io_pool.h"

namespace ckptfs {

class BlockCache {
 public:
  static constexpr uint64_t kMaxRun = 16;  // blocks of one ReadAt

  struct Options {
    // 64 requests of one block each, 20 ms away, are 200 MB/s.
    uint64_t block = 64 << 10;
    uint64_t limit = 256 << 20;
    size_t in_flight = 64;  // calls of ReadAt at a time
  };

  // A file as the cache knows it: `key` is another for other bytes.
  struct Source {
    std::shared_ptr<const File> file;
    Digest key;
  };
  struct BlockId {
    const Source* source = nullptr;
    uint64_t index = 0;
    bool operator==(const BlockId&) const = default;
  };
  class Bytes {
   public:
    explicit Bytes(size_t size)
        : data_(std::make_unique_for_overwrite<std::byte[]>(size)), size_(size) {}
    std::span<std::byte> span() { return {data_.get(), size_}; }
    std::span<const std::byte> span() const { return {data_.get(), size_}; }

   private:
    const std::unique_ptr<std::byte[]> data_;
    const size_t size_;
  };
  using Block = std::shared_ptr<const Bytes>;

  explicit BlockCache(const Options& options);

  // The blocks in the order of the ids.  An error if one cannot be had.
  // REQUIRES: ids are sorted (by source, then index), without repetition, and
  // every block exists.  BLOCKS: on the storage.
  Result<std::vector<Block>> Get(std::span<const BlockId> ids);

  // Fetch what is not there, for later.  Only a hint: an error is forgotten.
  void Prefetch(std::span<const BlockId> ids);

  // There, or on its way.
  bool Has(const BlockId& id);

  // Fill `out` from `offset` on.  kDataLoss if the range is not in the file.
  Status Read(const Source& source, uint64_t offset, std::span<std::byte> out);

  uint64_t block() const { return block_; }
  uint64_t fetched_bytes() const { return fetched_.load(std::memory_order_relaxed); }

 private:
  struct Key {
    Digest file;
    uint64_t index = 0;
    bool operator==(const Key&) const = default;
  };
  struct HashKey {
    size_t operator()(const Key& key) const {
      return static_cast<size_t>(key.file.low ^ (key.index * 0x9e3779b97f4a7c15u));
    }
  };
  using Flights = SingleFlight<Key, Block, HashKey>;
  // Neighbouring blocks of one file that this call fetches.
  struct Run {
    std::shared_ptr<const File> file;
    Digest key;
    uint64_t first = 0;
    std::vector<Flights::Flight> flights;
  };

  static Key KeyOf(const BlockId& id) { return {id.source->key, id.index}; }
  // Starts fetching block `id` if nobody is: joins it to `runs`.
  std::shared_future<Result<Block>> Start(const BlockId& id,
                                          std::vector<std::shared_ptr<Run>>& runs);
  void Fetch(Run& run);
  void Post(std::vector<std::shared_ptr<Run>> runs);

  const uint64_t block_;
  Lru<Key, Block, HashKey> blocks_;
  Flights flights_;
  std::atomic<uint64_t> fetched_{0};
  IoPool pool_;  // last: its tasks use the others
};

// As Get wants them: by source, then index, each once.
void SortBlocks(std::vector<BlockCache::BlockId>& ids);
// Where a block is in sorted ones that have it.
size_t FindBlock(std::span<const BlockCache::BlockId> ids, const BlockCache::BlockId& id);

}  // namespace ckptfs
