// SPDX-License-Identifier: Apache-2.0
//
// Saves for tests of what becomes of them on their way to the store.
//
// Thread safety: none.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/blob/chunk_digests.h"
#include "core/io/root.h"
#include "core/records/commit_records.h"
#include "snapshot/landing/save_bytes.h"
#include "tests/snapshot/nodes.h"

namespace ckptfs::testing_support {

inline constexpr std::chrono::hours kNever{1'000};

// A save of two ranks, in memory.
struct Save {
  explicit Save(uint64_t step) {
    bytes = std::make_shared<SaveBytes>(AttemptName{"run", "job", step, RandomDigest()}, step, 2);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      auto text = std::make_shared<std::string>(RankFileOf(step, rank, 2));
      ReceivedFile file;
      file.bytes = text->size();
      file.rope = {std::as_bytes(std::span(*text)).first(999),
                   std::as_bytes(std::span(*text)).subspan(999)};
      file.chunks = ChunkDigestsOf(*text);
      file.shelve = [places = places](const std::string& place) { places->push_back(place); };
      memory.push_back(text);
      file.lease = std::move(text);
      EXPECT_TRUE(bytes->Add(rank, file));
      EXPECT_EQ(file.lease, nullptr);
    }
  }
  const PreparedPart& part() const { return bytes->part(); }
  bool InMemory() const { return !memory[0].expired() || !memory[1].expired(); }

  std::shared_ptr<SaveBytes> bytes;
  std::vector<std::weak_ptr<std::string>> memory;
  std::shared_ptr<std::vector<std::string>> places = std::make_shared<std::vector<std::string>>();
};

inline void ExpectWhole(const Root& root, const PreparedPart& part) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto bytes = ReadWhole(root, part.PathOf(rank), 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_TRUE(*bytes == RankFileOf(part.step, rank, 2)) << "rank " << rank;
  }
}

}  // namespace ckptfs::testing_support
