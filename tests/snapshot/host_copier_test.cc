// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "snapshot/device/copier.h"

namespace ckptfs {
namespace {

MemoryCopy CopyOf(const char* from, std::string& to) {
  return {reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to.data()),
          to.size(), kHost};
}

// They lie in any order, far apart and within each other.
TEST(HostCopierTest, SmallOnesArriveWhereverTheyLie) {
  std::mt19937 random(7);
  std::vector<std::string> blocks(3, std::string(3 << 20, '?'));
  for (std::string& block : blocks) {
    for (char& byte : block) byte = static_cast<char>(random());
  }
  std::vector<const char*> places;
  std::vector<std::string> truth, copied;
  for (int i = 0; i < 500; ++i) {
    const std::string& block = blocks[random() % blocks.size()];
    const size_t bytes = i % 50 == 0 ? 200'000 : 1 + random() % 5000;
    places.push_back(block.data() + random() % (block.size() - bytes));
    truth.emplace_back(places.back(), bytes);
    copied.emplace_back(bytes, '?');
  }
  std::vector<MemoryCopy> copies;
  for (size_t i = 0; i < truth.size(); ++i) copies.push_back(CopyOf(places[i], copied[i]));
  HostCopier copier;
  ASSERT_TRUE(copier.Enqueue(copies, Trainer::kWaits));
  EXPECT_TRUE(copied == truth);
}

class HoleTest : public testing::Test {
 protected:
  void SetUp() override {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    // Far below where others are mapped, who would take the hole's place.
    void* const place = reinterpret_cast<void*>(uintptr_t{0x5520} << 32);
    void* const mapped =
        mmap(place, 3 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_EQ(mapped, place);
    memory_ = static_cast<char*>(mapped);
    std::fill_n(memory_, 3 * page_, 'x');
    munmap(memory_ + page_, page_);
  }
  void TearDown() override { munmap(memory_, 3 * page_); }

  size_t page_ = 0;
  char* memory_ = nullptr;
};

TEST_F(HoleTest, BetweenSmallOnesIsNobodys) {
  std::string first(100, '?'), last(100, '?');
  const std::vector copies{CopyOf(memory_ + 2 * page_ + 8, last), CopyOf(memory_ + 8, first)};
  ASSERT_TRUE(HostCopier().Enqueue(copies, Trainer::kWaits));
  EXPECT_EQ(first + last, std::string(200, 'x'));
}

TEST_F(HoleTest, ASmallOneThatWasGivenBackIsAnError) {
  for (const size_t from : {page_, page_ - 50, 2 * page_ - 50}) {
    std::string first(100, '?'), gone(100, '?'), last(100, '?');
    const std::vector copies{CopyOf(memory_ + 8, first), CopyOf(memory_ + from, gone),
                             CopyOf(memory_ + 2 * page_ + 100, last)};
    const Status done = HostCopier().Enqueue(copies, Trainer::kWaits);
    ASSERT_FALSE(done);
    EXPECT_THAT(done.error().message, testing::HasSubstr("freed before the update"));
  }
}

}  // namespace
}  // namespace ckptfs
