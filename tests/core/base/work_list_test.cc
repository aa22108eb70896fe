// SPDX-License-Identifier: Apache-2.0

#include "core/base/work_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <vector>

namespace ckptfs {
namespace {

TEST(WorkList, EveryItemOnceAndProgressToTheEnd) {
  std::vector<std::atomic<int>> seen(1000);
  JobProgress last;
  JobOptions options;
  options.threads = 7;
  options.progress = [&last](const JobProgress& progress) { last = progress; };
  const Status done = RunWorkList(seen.size(), 3000, options, [&](size_t i) -> Result<uint64_t> {
    ++seen[i];
    return uint64_t{3};
  });
  ASSERT_TRUE(done);
  for (const auto& count : seen) EXPECT_EQ(count, 1);
  EXPECT_EQ(last.bytes_done, 3000u);
  EXPECT_EQ(last.bytes_total, 3000u);
  EXPECT_EQ(last.items_done, 1000u);
}

TEST(WorkList, NothingToDo) {
  EXPECT_TRUE(RunWorkList(0, 0, {}, [](size_t) -> Result<uint64_t> { return uint64_t{0}; }));
}

TEST(WorkList, TheFirstErrorStopsTheRest) {
  std::atomic<int> ran{0};
  JobOptions options;
  options.threads = 2;
  const Status done = RunWorkList(100000, 0, options, [&](size_t i) -> Result<uint64_t> {
    ++ran;
    if (i == 5) return Fail(ErrorCode::kExhausted, "full");
    return uint64_t{0};
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kExhausted);
  EXPECT_LT(ran, 100000);
}

// It used to end the program.
TEST(WorkList, AnItemThatThrowsIsAnError) {
  const Status done = RunWorkList(3, 0, {}, [](size_t i) -> Result<uint64_t> {
    if (i == 1) throw std::bad_alloc();
    return uint64_t{0};
  });
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kExhausted);
}

}  // namespace
}  // namespace ckptfs
