// SPDX-License-Identifier: Apache-2.0
//
// Processes that publish into one store are killed at random moments: whatever
// a survivor finds is whole, and what was reported as published is there.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>

#include "core/base/strings.h"
#include "core/store/store.h"
#include "tests/core/store/sample_model.h"

namespace ckptfs {
namespace {

using testing_support::TinyModel;

// Publishes forever; the count of finished steps is in shared memory.
[[noreturn]] void PublishForever(const std::string& directory, int child,
                                 std::atomic<int>* published) {
  auto store = Store::Open(directory, true);
  if (!store) _exit(1);
  for (int i = 0;; ++i) {
    const auto record = (*store)->Publish(
        "run", TinyModel(StrCat("c", child, "_", i), static_cast<uint64_t>(i), child), "/r/x",
        "/r");
    if (!record) _exit(2);
    published->fetch_add(1);
  }
}

TEST(StoreKillTest, KilledPublishersLeaveWholeSteps) {
  std::string pattern = testing::TempDir() + "store_killXXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* published = new (shared) std::atomic<int>(0);
  std::mt19937 random(11);
  for (int child = 0; child < 24; ++child) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) PublishForever(directory, child, published);
    usleep(1000 + random() % 40000);
    kill(pid, SIGKILL);
    int status = 0;
    waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the publisher failed: " << WEXITSTATUS(status);
  }
  auto store = Store::Open(directory, false);
  if (published->load() > 0) {
    ASSERT_TRUE(store) << store.error().message;
    const auto steps = (*store)->Steps("run");
    ASSERT_TRUE(steps) << steps.error().message;
    EXPECT_GE(static_cast<int>(steps->size()), published->load());
    for (const StepRecord& record : *steps) {
      const auto step = (*store)->Load(record);
      EXPECT_TRUE(step) << step.error().message;
    }
  }
  munmap(shared, 4096);
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace ckptfs
