// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/page_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "fs/serve/page_reserve.h"

namespace ckptfs {
namespace {

class PagePoolTest : public ::testing::Test {
 protected:
  // Skips where the machine has no huge-page tmpfs for us.
  void Open(uint64_t budget) {
    auto pool = PagePool::Create(budget);
    if (!pool) GTEST_SKIP() << pool.error().message;
    pool_ = *std::move(pool);
  }
  static void Write(const PagePool::File& file, char letter) {
    const std::string bytes(file.size, letter);
    ASSERT_EQ(pwrite(file.fd.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  static uint64_t BytesHeld(const PagePool::File& file) {
    struct stat info;
    fstat(file.fd.get(), &info);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  }
  std::unique_ptr<PagePool> pool_;
};

TEST_F(PagePoolTest, FilesHaveExactlyTheSizeAskedFor) {
  Open(64 * kHugePage);
  if (!pool_) return;
  for (const uint64_t size : {uint64_t{1}, uint64_t{4096}, kHugePage, 3 * kHugePage + 5}) {
    auto file = pool_->Take(size).value();
    struct stat info;
    ASSERT_EQ(fstat(file.fd.get(), &info), 0);
    EXPECT_EQ(static_cast<uint64_t>(info.st_size), size);
    pool_->Give(std::move(file));
  }
}

TEST_F(PagePoolTest, PagesAreRecycledAndTheirTailIsZero) {
  Open(64 * kHugePage);
  if (!pool_) return;
  auto first = pool_->Take(8 * kHugePage).value();
  Write(first, 'x');
  const int descriptor = first.fd.get();
  pool_->Give(std::move(first));
  EXPECT_EQ(pool_->idle_bytes(), 8 * kHugePage);
  auto second = pool_->Take(6 * kHugePage + 100).value();
  EXPECT_EQ(second.fd.get(), descriptor);
  EXPECT_EQ(pool_->idle_bytes(), 0u);
  EXPECT_GE(BytesHeld(second), 6 * kHugePage) << "its pages are there already";
  auto* page = static_cast<char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, second.fd.get(),
                                       static_cast<off_t>(6 * kHugePage)));
  ASSERT_NE(page, MAP_FAILED);
  EXPECT_EQ(std::string(page + 100, 4096 - 100), std::string(4096 - 100, '\0'));
  munmap(page, 4096);
  pool_->Give(std::move(second));
}

TEST_F(PagePoolTest, BudgetHoldsAndIdleFilesMakeRoom) {
  Open(10 * kHugePage);
  if (!pool_) return;
  EXPECT_EQ(pool_->Take(11 * kHugePage).error().code, ErrorCode::kExhausted);
  auto six = pool_->Take(6 * kHugePage).value();
  EXPECT_EQ(pool_->Take(5 * kHugePage).error().code, ErrorCode::kExhausted);
  auto four = pool_->Take(4 * kHugePage).value();
  pool_->Give(std::move(six));
  pool_->Give(std::move(four));
  auto ten = pool_->Take(10 * kHugePage).value();
  EXPECT_EQ(pool_->lent_bytes(), 10 * kHugePage);
  EXPECT_EQ(pool_->idle_bytes(), 0u);
  pool_->Give(std::move(ten));
  // A small file does not spend a large one's pages while there is room.
  auto small = pool_->Take(1).value();
  EXPECT_LE(pool_->lent_bytes() + pool_->idle_bytes(), 10 * kHugePage);
  pool_->Discard(std::move(small));
  EXPECT_EQ(pool_->lent_bytes(), 0u);
}

TEST_F(PagePoolTest, KnowsWhatSomebodyElseHasMapped) {
  Open(8 * kHugePage);
  if (!pool_) return;
  auto file = pool_->Take(kHugePage).value();
  EXPECT_FALSE(PagePool::IsMapped(file));
  const std::string path = "/proc/self/fd/" + std::to_string(file.fd.get());
  const int reader = open(path.c_str(), O_RDONLY);
  ASSERT_GE(reader, 0);
  EXPECT_TRUE(PagePool::IsMapped(file));
  void* mapped = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, reader, 0);
  close(reader);
  EXPECT_TRUE(PagePool::IsMapped(file)) << "the mapping outlives the descriptor";
  munmap(mapped, 4096);
  EXPECT_FALSE(PagePool::IsMapped(file));
  pool_->Give(std::move(file));
}

TEST_F(PagePoolTest, DefaultBudgetIsAPartOfTheMachine) {
  const uint64_t machine =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  EXPECT_GT(MemoryToUse(), 0u);
  EXPECT_LE(MemoryToUse(), machine);
  EXPECT_EQ(MaterialiseBudget(0, 4000), 1000u);
  EXPECT_EQ(MaterialiseBudget(2000, 4000), 2000u);
  EXPECT_EQ(MaterialiseBudget(8000, 4000), 3000u);  // the group would end the daemon
}

TEST_F(PagePoolTest, APreparedFileHasItsPagesAndIsTakenFirst) {
  Open(64 * kHugePage);
  if (!pool_) return;
  const auto never = [] { return false; };
  ASSERT_EQ(pool_->Prepare(32 * kHugePage, never), 32 * kHugePage);
  EXPECT_EQ(pool_->idle_bytes(), 32 * kHugePage);
  EXPECT_EQ(pool_->Prepare(33 * kHugePage, never), 0u) << "more than the budget";
  EXPECT_EQ(pool_->lent_bytes(), 0u);
  auto file = pool_->Take(20 * kHugePage - 7).value();
  EXPECT_EQ(pool_->idle_bytes(), 0u) << "shrunk rather than left for a new one";
  EXPECT_GE(BytesHeld(file), 20 * kHugePage);
  pool_->Give(std::move(file));
}

TEST_F(PagePoolTest, PreparingStopsWhenItIsToldAndKeepsWhatItHas) {
  Open(128 * kHugePage);
  if (!pool_) return;
  int asked = 0;
  EXPECT_EQ(pool_->Prepare(100 * kHugePage, [&] { return ++asked == 3; }), 64 * kHugePage);
  EXPECT_EQ(pool_->idle_bytes(), 64 * kHugePage);
  EXPECT_EQ(pool_->Prepare(32 * kHugePage, [] { return true; }), 0u);
  EXPECT_EQ(pool_->lent_bytes(), 0u);
  EXPECT_EQ(pool_->idle().files, 1u);
}

TEST_F(PagePoolTest, WhoTakesAFileGoesBeforeWhatIsPrepared) {
  Open(128 * kHugePage);
  if (!pool_) return;
  std::atomic<bool> asked{false}, go{false};
  std::thread prepares([&] {
    EXPECT_EQ(pool_->Prepare(100 * kHugePage,
                             [&] {
                               asked = true;
                               while (!go) std::this_thread::yield();
                               return false;
                             }),
              32 * kHugePage)
        << "it stops at its next step";
  });
  while (!asked) std::this_thread::yield();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    go = true;
  });
  auto file = pool_->Take(120 * kHugePage);
  prepares.join();
  later.join();
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(pool_->lent_bytes(), 120 * kHugePage);
  pool_->Discard(*std::move(file));
}

TEST(PageReserveTest, PreparesWhatIsExpectedThenSuchAsWereTaken) {
  const uint64_t page = kHugePage;
  const uint64_t reserve = 100 * page;
  EXPECT_EQ(NextToPrepare(reserve, {}), 0u) << "nothing is known";
  EXPECT_EQ(NextToPrepare(reserve, {0, 0, 0, {30 * page}}), 30 * page);
  EXPECT_EQ(NextToPrepare(reserve, {1, 10 * page, 0, {30 * page}}), 20 * page) << "it was stopped";
  EXPECT_EQ(NextToPrepare(reserve, {1, 30 * page, 0, {30 * page}}), 0u) << "one is enough";
  EXPECT_EQ(NextToPrepare(reserve, {1, 30 * page, 0, {30 * page, 50 * page}}), 50 * page);
  EXPECT_EQ(NextToPrepare(reserve, {2, 80 * page, 0, {30 * page, 50 * page, 50 * page}}), 20 * page)
      << "as much as it may";
  EXPECT_EQ(NextToPrepare(reserve, {0, 0, 0, {300 * page}}), reserve) << "as much as it may";
  EXPECT_EQ(NextToPrepare(reserve, {0, 0, 30 * page, {7 * page}}), 7 * page);
  EXPECT_EQ(NextToPrepare(reserve, {1, 7 * page, 30 * page, {7 * page}}), 30 * page);
  EXPECT_EQ(NextToPrepare(reserve, {2, 60 * page, 30 * page}), 30 * page);
  EXPECT_EQ(NextToPrepare(reserve, {3, 90 * page, 30 * page}), 0u);
  EXPECT_EQ(NextToPrepare(reserve, {0, 0, 300 * page}), reserve);
  EXPECT_EQ(NextToPrepare(page - 1, {0, 0, page, {page}}), 0u);
}

TEST_F(PagePoolTest, TheLastFilesLookedAtAreExpectedOnce) {
  Open(4 * kHugePage);
  if (!pool_) return;
  for (uint64_t file = 0; file < PagePool::kMostExpected + 2; ++file) {
    pool_->Expect(file, file * kHugePage);
  }
  pool_->Expect(5, 1);
  pool_->ExpectNoMore(7);
  const auto expected = pool_->idle().expected;
  ASSERT_EQ(expected.size(), PagePool::kMostExpected - 1);
  EXPECT_EQ(expected.front(), 2 * kHugePage);
  EXPECT_EQ(expected[3], kHugePage) << "5, of another size now";
  EXPECT_EQ(expected[5], 8 * kHugePage) << "not 7";
}

TEST_F(PagePoolTest, AReserveIsReadyAndMadeUpForWhenItIsQuiet) {
  Open(64 * kHugePage);
  if (!pool_) return;
  std::atomic<uint64_t> activity{0};
  std::atomic<bool> busy{false};
  PageReserve reserve(*pool_, 16 * kHugePage,
                      [&] { return busy ? activity.fetch_add(1) : activity.load(); });
  const auto wait_for = [&](uint64_t idle) {
    for (int i = 0; i < 3000 && pool_->idle_bytes() != idle; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return pool_->idle_bytes() == idle;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_TRUE(reserve.settled()) << "nothing is wanted";
  busy = true;
  pool_->Expect(1, 16 * kHugePage);
  EXPECT_FALSE(reserve.settled());
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_EQ(pool_->idle_bytes(), 0u) << "not while files are read";
  busy = false;
  ASSERT_TRUE(wait_for(16 * kHugePage));
  EXPECT_TRUE(reserve.settled());
  pool_->ExpectNoMore(1);
  auto file = pool_->Take(5 * kHugePage).value();
  EXPECT_TRUE(wait_for(15 * kHugePage)) << "three of the size that was taken";
  pool_->Give(std::move(file));
}

}  // namespace
}  // namespace ckptfs
