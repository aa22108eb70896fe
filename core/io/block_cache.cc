// SPDX-License-Identifier: Apache-2.0

#include "core/io/block_cache.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kReadWindow = 32 << 20;  // bytes whose blocks a Read holds at a time

bool InFileOrder(const BlockCache::BlockId& a, const BlockCache::BlockId& b) {
  if (a.source != b.source) return std::less<>()(a.source, b.source);
  return a.index < b.index;
}

}  // namespace

void SortBlocks(std::vector<BlockCache::BlockId>& ids) {
  std::sort(ids.begin(), ids.end(), InFileOrder);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

size_t FindBlock(std::span<const BlockCache::BlockId> ids, const BlockCache::BlockId& id) {
  return static_cast<size_t>(std::lower_bound(ids.begin(), ids.end(), id, InFileOrder) -
                             ids.begin());
}

BlockCache::BlockCache(const Options& options)
    : block_(options.block),
      blocks_(options.limit, [](const Block& block) { return block->span().size(); }),
      pool_(options.in_flight) {}

std::shared_future<Result<BlockCache::Block>> BlockCache::Start(
    const BlockId& id, std::vector<std::shared_ptr<Run>>& runs) {
  Flights::Flight flight = flights_.Join(KeyOf(id));
  std::shared_future<Result<Block>> landed = flight.landed();
  if (!flight.leads()) return landed;
  // Another flight may have landed between the look into the cache and now.
  if (auto there = blocks_.Find(KeyOf(id))) {
    flight.Land(*std::move(there));
    return landed;
  }
  const bool follows = !runs.empty() && runs.back()->key == id.source->key &&
                       runs.back()->first + runs.back()->flights.size() == id.index &&
                       runs.back()->flights.size() < kMaxRun;
  if (!follows) {
    runs.push_back(std::make_shared<Run>());
    runs.back()->file = id.source->file;
    runs.back()->key = id.source->key;
    runs.back()->first = id.index;
  }
  runs.back()->flights.push_back(std::move(flight));
  return landed;
}

void BlockCache::Fetch(Run& run) {
  std::vector<std::shared_ptr<Bytes>> blocks;
  std::vector<ReadRequest> requests;
  const Status read = Caught([&]() -> Status {
    for (size_t i = 0; i < run.flights.size(); ++i) {
      const uint64_t at = (run.first + i) * block_;
      const uint64_t room = run.file->size() - std::min(at, run.file->size());
      blocks.push_back(std::make_shared<Bytes>(std::min(block_, room)));
      requests.push_back(ReadRequest{at, blocks.back()->span()});
    }
    return run.file->ReadAt(requests);
  });
  for (size_t i = 0; i < run.flights.size(); ++i) {
    if (!read) {
      run.flights[i].Land(Fail(Error(read.error())));
      continue;
    }
    fetched_.fetch_add(blocks[i]->span().size(), std::memory_order_relaxed);
    // In the cache first: who asks after the landing finds it there.
    Block block = std::move(blocks[i]);
    blocks_.Replace(Key{run.key, run.first + i}, block);
    run.flights[i].Land(std::move(block));
  }
}

void BlockCache::Post(std::vector<std::shared_ptr<Run>> runs) {
  for (std::shared_ptr<Run>& run : runs) {
    pool_.Post([this, run = std::move(run)] {
      // A block that cannot be kept becomes an error when the run ends.
      (void)Caught([&]() -> Status {
        Fetch(*run);
        return {};
      });
    });
  }
}

Result<std::vector<BlockCache::Block>> BlockCache::Get(std::span<const BlockId> ids) {
  std::vector<Block> blocks(ids.size());
  std::vector<std::pair<size_t, std::shared_future<Result<Block>>>> awaited;
  std::vector<std::shared_ptr<Run>> runs;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (auto there = blocks_.Find(KeyOf(ids[i]))) {
      blocks[i] = *std::move(there);
    } else {
      awaited.emplace_back(i, Start(ids[i], runs));
    }
  }
  Post(std::move(runs));
  for (const auto& [i, landed] : awaited) {
    const Result<Block>& block = landed.get();
    if (!block) return Fail(Error(block.error()));
    blocks[i] = *block;
  }
  return blocks;
}

void BlockCache::Prefetch(std::span<const BlockId> ids) {
  std::vector<std::shared_ptr<Run>> runs;
  for (const BlockId& id : ids) {
    if (!Has(id)) (void)Start(id, runs);
  }
  Post(std::move(runs));
}

bool BlockCache::Has(const BlockId& id) {
  return flights_.Flies(KeyOf(id)) || blocks_.Find(KeyOf(id)).has_value();
}

Status BlockCache::Read(const Source& source, uint64_t offset, std::span<std::byte> out) {
  if (!RangeInside(offset, out.size(), source.file->size())) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(source.file->name(), " has ", source.file->size(), " bytes; bytes ", offset,
                       " + ", out.size(), " are not there"));
  }
  std::vector<BlockId> ids;
  while (!out.empty()) {
    const size_t length = std::min<uint64_t>(out.size(), kReadWindow);
    ids.clear();
    for (uint64_t k = offset / block_; k * block_ < offset + length; ++k)
      ids.push_back({&source, k});
    CKPT_ASSIGN_OR_RETURN(const std::vector<Block> blocks, Get(ids));
    for (size_t i = 0, done = 0; i < ids.size(); ++i) {
      const uint64_t within = i == 0 ? offset % block_ : 0;
      const size_t n = std::min<uint64_t>(length - done, block_ - within);
      std::memcpy(out.data() + done, blocks[i]->span().data() + within, n);
      done += n;
    }
    out = out.subspan(length);
    offset += length;
  }
  return {};
}

}  // namespace ckptfs
