// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/materialiser.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/blob/touched_files.h"
#include "fs/tree/source_files.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

constexpr InodeNumber kInode{7};

class MaterialiserTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto pool = PagePool::Create(kHugePage); !pool) GTEST_SKIP() << pool.error().message;
    const auto step = entry_.Mounted().value();
    plan_ = std::make_unique<PreparedPlan>(
        step, ShownPlan{PlanSourceFile(step->model(), BlobIndex{0}).value(), step->shared_model()},
        "source");
  }

  testing::TreeFixture t_;
  RecentSteps recent_{1};
  StepEntry entry_{t_.catalogue(), t_.AddStep("r", "s", 1), {}, {}, recent_};
  std::unique_ptr<PreparedPlan> plan_;
};

// It used to leave the file half filled, and the next process that opened it waited for ever.
TEST_F(MaterialiserTest, AFillThatThrowsIsAnErrorAndTheNextOpenFillsAgain) {
  std::atomic<int> fills{0};
  Materialiser materialiser(PagePool::Create(8 * kHugePage).value(),
                            [&](const PreparedPlan& plan, const PagePool::File& file) -> Status {
                              if (fills++ == 0) throw std::bad_alloc();
                              return Materialiser::FillFile(plan, file);
                            });
  const auto failed = materialiser.Acquire(kInode, *plan_);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kExhausted);
  EXPECT_EQ(materialiser.pool().lent_bytes(), 0u);
  const auto filled = materialiser.Acquire(kInode, *plan_);
  ASSERT_TRUE(filled) << filled.error().message;
  EXPECT_EQ(materialiser.counts().fills, 1u);
  EXPECT_EQ(materialiser.Acquire(kInode, *plan_).value(), *filled);
}

// Half is read, something happens, the rest is read: who opened the file gets what was
// adopted or an error.
TEST_F(MaterialiserTest, ASourceThatMovesInTheMiddleOfAFill) {
  const std::string truth = testing::TreeFixture::SourceBytes(3);
  for (const testing::Accident& accident : testing::Accidents()) {
    SCOPED_TRACE(accident.name);
    t_.WriteOldSource("r", accident.name, 3);
    RecentSteps recent(1, RecentSteps::kBytes,
                       std::make_shared<TouchedFiles>(TouchedFiles::Options{}));
    StepEntry entry(t_.catalogue(), t_.AddStep("r", accident.name, 1, 3), {}, {}, recent);
    const auto step = entry.Mounted().value();
    const PreparedPlan source(
        step, ShownPlan{PlanSourceFile(step->model(), BlobIndex{0}).value(), step->shared_model()},
        "source");
    int fills = 0;
    Materialiser materialiser(PagePool::Create(8 * kHugePage).value(),
                              [&](const PreparedPlan& plan, const PagePool::File& file) -> Status {
                                std::string bytes(truth.size(), '?');
                                const auto out = std::as_writable_bytes(std::span(bytes));
                                const size_t half = bytes.size() / 2;
                                CKPT_RETURN_IF_ERROR(plan.reader().Read(0, out.first(half)));
                                if (fills++ == 0)
                                  accident.happen(t_.SourcePath("r", accident.name));
                                CKPT_RETURN_IF_ERROR(plan.reader().Read(half, out.subspan(half)));
                                return WriteAll(file.fd.get(), 0, out, "file");
                              });
    const auto filled = materialiser.Acquire(kInode, source);
    EXPECT_EQ(filled.has_value(), accident.same);
    if (!filled) continue;
    std::string bytes(truth.size(), '?');
    EXPECT_EQ(pread((*filled)->fd(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    EXPECT_TRUE(bytes == truth);
  }
}

TEST_F(MaterialiserTest, WhoWaitsForAFillThatThrowsGetsItsError) {
  std::atomic<int> waiting{0};
  Materialiser materialiser(PagePool::Create(8 * kHugePage).value(),
                            [&](const PreparedPlan&, const PagePool::File&) -> Status {
                              while (waiting < 3) std::this_thread::yield();
                              throw std::bad_alloc();
                            });
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      ++waiting;
      EXPECT_FALSE(materialiser.Acquire(kInode, *plan_));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ckptfs
