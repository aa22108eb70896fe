// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "tests/core/view/random_case.h"

namespace ckptfs {
namespace {

std::string ReadRange(const PlanReader& reader, uint64_t offset, uint64_t length) {
  std::string out(length, '\xaa');
  const auto read = reader.Read(offset, std::as_writable_bytes(std::span(out)));
  if (!read) return "error: " + read.error().message;
  out.resize(*read);
  return out;
}

// A range of the file as its segments lend it; nothing if one of them does not.
std::optional<std::string> LentText(const RandomCase& test_case, BlobReader& blobs, uint64_t offset,
                                    uint64_t end) {
  Lender lender(blobs);
  for (const Segment& segment : test_case.plan().segments()) {
    const uint64_t from = std::max(offset, segment.begin);
    const uint64_t to = std::min(end, segment.end);
    if (from >= to) continue;
    if (!LendSegment(segment, test_case.model(), from - segment.begin, to - segment.begin,
                     lender)) {
      return std::nullopt;
    }
  }
  std::string out;
  const LentBytes lent = std::move(lender).Take();
  for (const std::span<const std::byte> span : lent.spans) {
    out.append(reinterpret_cast<const char*>(span.data()), span.size());
  }
  return out;
}

class RandomLayouts : public testing::TestWithParam<int> {};

// Every case: the whole file at once, then any split of it, equal the oracle.
TEST_P(RandomLayouts, EqualTheOracle) {
  for (int i = 0; i < 250; ++i) {
    const uint64_t seed = static_cast<uint64_t>(GetParam()) * 1000 + static_cast<uint64_t>(i);
    const RandomCase test_case(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << test_case.Describe());
    const Status valid = test_case.plan().Validate(test_case.model());
    ASSERT_TRUE(valid) << valid.error().message;
    const auto blobs = BlobReader::Create(test_case.model(), {});
    const PlanReader reader(test_case.plan(), test_case.model(), *blobs);
    const std::string& expected = test_case.expected();
    ASSERT_EQ(test_case.plan().size(), expected.size());
    ASSERT_TRUE(ReadRange(reader, 0, expected.size() + 10) == expected);
    std::mt19937_64 random(seed);
    for (int k = 0; k < 20; ++k) {
      const uint64_t offset = random() % (expected.size() + 1);
      const uint64_t length = random() % (random() % 2 == 0 ? 40 : expected.size() + 1);
      ASSERT_TRUE(ReadRange(reader, offset, length) == expected.substr(offset, length))
          << offset << " + " << length;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomLayouts, testing::Range(0, 8));

// Lent bytes are those that would be read; pieces that are cut, cast or scaled are not lent.
TEST_P(RandomLayouts, LendWhatTheyAre) {
  int lent = 0;
  for (int i = 0; i < 250; ++i) {
    const uint64_t seed = static_cast<uint64_t>(GetParam()) * 1000 + static_cast<uint64_t>(i);
    const RandomCase test_case(seed);
    const auto blobs = BlobReader::Create(test_case.model(), {});
    const std::string& expected = test_case.expected();
    std::mt19937_64 random(seed);
    for (int k = 0; k < 20; ++k) {
      const uint64_t begin = k == 0 ? 0 : random() % (expected.size() + 1);
      const uint64_t end =
          k == 0 ? expected.size() : begin + random() % (expected.size() - begin + 1);
      const auto text = LentText(test_case, *blobs, begin, end);
      if (!text) continue;
      ASSERT_TRUE(*text == expected.substr(begin, end - begin))
          << "seed " << seed << ": " << test_case.Describe() << ", " << begin << " to " << end;
      lent += text->empty() ? 0 : 1;
    }
  }
  EXPECT_GT(lent, 100);
}

TEST(PlanReader, OnlyLongRangesAreLent) {
  const RandomCase test_case(1);
  const auto blobs = BlobReader::Create(test_case.model(), {});
  const PlanReader reader(test_case.plan(), test_case.model(), *blobs);
  EXPECT_FALSE(reader.Lend(0, 4096));
  EXPECT_FALSE(reader.Lend(test_case.plan().size(), 1 << 20));
}

TEST(PlanReader, SixtyFourThreadsReadAtOnce) {
  for (uint64_t seed = 90000; seed < 90004; ++seed) {
    const RandomCase test_case(seed);
    const auto blobs = BlobReader::Create(test_case.model(), {});
    const PlanReader reader(test_case.plan(), test_case.model(), *blobs);
    const std::string& expected = test_case.expected();
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 64; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(t);
        for (int k = 0; k < 50; ++k) {
          const uint64_t offset = random() % (expected.size() + 1);
          const uint64_t length = random() % (expected.size() + 1);
          if (ReadRange(reader, offset, length) != expected.substr(offset, length)) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0) << seed;
  }
}

}  // namespace
}  // namespace ckptfs
