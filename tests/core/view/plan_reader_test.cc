// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan_reader.h"

#include <gtest/gtest.h>

#include <atomic>
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
