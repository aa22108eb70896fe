// SPDX-License-Identifier: Apache-2.0

#include "core/io/block_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/slow_root.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlock = BlockCache::Options{}.block;

std::string Pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  return text;
}

class BlockCacheTest : public testing::Test {
 protected:
  BlockCache::Source Add(const std::string& name, size_t size) {
    const std::string bytes = Pattern(size);
    EXPECT_TRUE(storage_->PublishIfAbsent(name, std::as_bytes(std::span(bytes))));
    return {*root_.Open(name), DigestOf(name)};
  }
  std::string Read(BlockCache& cache, const BlockCache::Source& source, uint64_t offset,
                   size_t length) {
    std::string out(length, '?');
    const Status read = cache.Read(source, offset, std::as_writable_bytes(std::span(out)));
    return read ? out : StrCat(ErrorCodeName(read.error().code), ": ", read.error().message);
  }

  std::shared_ptr<FaultyStorage> storage_ = std::make_shared<FaultyStorage>();
  SlowRoot root_{storage_, {std::chrono::milliseconds(5), 1e9}};
};

TEST_F(BlockCacheTest, ReadsAnyRangeAndFetchesABlockOnce) {
  const size_t size = 5 * kBlock + 77;
  const BlockCache::Source file = Add("a", size);
  const std::string whole = Pattern(size);
  BlockCache cache({});
  for (const auto& [offset, length] : {std::pair<uint64_t, size_t>{3, 10},
                                       {kBlock - 5, 10},
                                       {0, size},
                                       {size - 1, 1},
                                       {5 * kBlock, 77},
                                       {2 * kBlock, kBlock},
                                       {size, 0}}) {
    EXPECT_EQ(Read(cache, file, offset, length), whole.substr(offset, length)) << offset;
  }
  EXPECT_EQ(root_.counts().bytes, size);
  EXPECT_EQ(cache.fetched_bytes(), size);
  EXPECT_TRUE(Read(cache, file, size - 1, 2).starts_with("data loss: memory/a has"));
}

TEST_F(BlockCacheTest, MissingNeighboursAreOneRequestTheRestAreInFlightTogether) {
  Add("a", 200 * kBlock);
  const SlowRoot root(storage_, {std::chrono::milliseconds(5), 1e9, 60});
  const BlockCache::Source file{*root.Open("a"), DigestOf("a")};
  BlockCache cache({});
  std::vector<BlockCache::BlockId> every_other;
  for (uint64_t k = 0; k < 200; k += 2) every_other.push_back({&file, k});
  ASSERT_TRUE(cache.Get(every_other));
  EXPECT_EQ(root.counts().requests, 100u);
  EXPECT_GE(root.counts().most_in_flight, 60u);
  BlockCache other({});
  const uint64_t before = root.counts().requests;
  Read(other, file, 0, 200 * kBlock);
  EXPECT_EQ(root.counts().requests - before, (200 + BlockCache::kMaxRun - 1) / BlockCache::kMaxRun);
}

TEST_F(BlockCacheTest, SixteenReadersFetchEveryBlockOnce) {
  const size_t size = 64 * kBlock;
  const BlockCache::Source file = Add("a", size);
  const std::string whole = Pattern(size);
  BlockCache cache({});
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (size_t t = 0; t < 16; ++t) {
    readers.emplace_back([&, t] {
      for (size_t i = 0; i < 32; ++i) {
        const uint64_t at = (i * 7 + t * 11) % 32 * (2 * kBlock);
        if (Read(cache, file, at, 2 * kBlock) != whole.substr(at, 2 * kBlock)) ++wrong;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(root_.counts().bytes, size);
  EXPECT_EQ(root_.counts().most_reads_of_a_byte, 1u);
}

TEST_F(BlockCacheTest, WhatWasPrefetchedIsWaitedForNotFetchedAgain) {
  const BlockCache::Source file = Add("a", 8 * kBlock);
  BlockCache cache({});
  std::vector<BlockCache::BlockId> ids;
  for (uint64_t k = 0; k < 8; ++k) ids.push_back({&file, k});
  cache.Prefetch(ids);
  EXPECT_TRUE(cache.Has(ids[3]));
  EXPECT_EQ(Read(cache, file, 0, 8 * kBlock), Pattern(8 * kBlock));
  cache.Prefetch(ids);
  EXPECT_EQ(root_.counts().bytes, 8 * kBlock);
}

TEST_F(BlockCacheTest, StaysWithinItsBound) {
  const BlockCache::Source file = Add("a", 64 * kBlock);
  BlockCache cache({.block = kBlock, .limit = 4 * kBlock, .in_flight = 8});
  const std::string whole = Pattern(64 * kBlock);
  for (uint64_t k = 0; k < 64; ++k) {
    EXPECT_EQ(Read(cache, file, k * kBlock, kBlock), whole.substr(k * kBlock, kBlock));
  }
  EXPECT_FALSE(cache.Has({&file, 0}));
  EXPECT_TRUE(cache.Has({&file, 63}));
}

TEST_F(BlockCacheTest, AnErrorIsForThoseWhoAskedAndIsNotKept) {
  const BlockCache::Source file = Add("a", 2 * kBlock);
  BlockCache cache({});
  storage_->FailAt(1, ErrorCode::kIo);
  EXPECT_TRUE(Read(cache, file, 0, 10).starts_with(ErrorCodeName(ErrorCode::kIo)));
  EXPECT_FALSE(cache.Has({&file, 0}));
  EXPECT_EQ(Read(cache, file, 0, 10), Pattern(2 * kBlock).substr(0, 10));
}

TEST_F(BlockCacheTest, FilesOfOtherKeysShareNothing) {
  BlockCache cache({});
  const BlockCache::Source a = Add("a", kBlock);
  BlockCache::Source changed = a;
  changed.key = DigestOf("a, changed");
  Read(cache, a, 0, 1);
  EXPECT_FALSE(cache.Has({&changed, 0}));
}

// Ends while fetches are queued and running.
TEST_F(BlockCacheTest, EndsWithWorkInFlight) {
  const BlockCache::Source file = Add("a", 64 * kBlock);
  for (int round = 0; round < 3; ++round) {
    BlockCache cache({.block = kBlock, .limit = 1 << 20, .in_flight = 2});
    for (uint64_t k = 0; k < 64; k += 2) {
      const BlockCache::BlockId id{&file, k};
      cache.Prefetch({&id, 1});
    }
  }
}

}  // namespace
}  // namespace ckptfs
