// SPDX-License-Identifier: Apache-2.0
//
// Saves on their way to a real disk whose system calls fail, one after another: retried where
// that helps, and never half there.  spool_test.cc and snapshot_store_test.cc have storages that
// fail as a whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "core/commit/spool.h"
#include "core/io/file_root.h"
#include "core/io/file_storage.h"
#include "core/store/step_catalogue.h"
#include "tests/snapshot/landings.h"
#include "tests/snapshot/nodes.h"
#include "tests/snapshot/spooling.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_io.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing_support::ExpectWhole;
using testing_support::IsStepThere;
using testing_support::RankFileOf;
using testing_support::Save;
using testing_support::StoreLanding;

// A store on a disk, and a step of two ranks for it.
class DiskFaultsTest : public testing::Test {
 protected:
  struct Place {
    Place() : storage(*FileStorage::Open(directory.path(), true)), store(*Store::OpenOn(storage)) {}
    Result<StepRecord> Keep(milliseconds limit) {
      StepCatalogue catalogue(*store);
      StoreLanding landing(*store, catalogue, [](const StepRecord&) { return Status(); }, nullptr,
                           {milliseconds(1), milliseconds(1), limit});
      ReceivedStep received{{"run", "job", 1}, 3, {}};
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const auto text = std::make_shared<std::string>(RankFileOf(3, rank, 2));
        received.files.push_back(
            {text->size(), {std::as_bytes(std::span(*text))}, ChunkDigestsOf(*text), false, text});
      }
      return landing.Keep(std::move(received));
    }
    bool HasNothingHalf() const { return std::filesystem::is_empty(directory.path() + "/.tmp"); }

    const TemporaryDirectory directory;
    const std::shared_ptr<Storage> storage;
    const std::unique_ptr<Store> store;
  };
};

TEST_F(DiskFaultsTest, AStepIsStoredWhateverCallFailsOnce) {
  for (uint64_t n = 1;; ++n) {
    Place place;
    std::optional<SystemCall> failed;
    Result<StepRecord> kept = [&] {
      const WatchedIo watch(n);
      auto done = place.Keep(milliseconds(60'000));
      failed = watch.failed();
      return done;
    }();
    SCOPED_TRACE(failed ? failed->name + " " + failed->path : "nothing failed");
    ASSERT_TRUE(kept) << kept.error().message;
    EXPECT_TRUE(IsStepThere(place.storage, "3", 3, 2));
    EXPECT_TRUE(place.HasNothingHalf());
    if (HasFailure() || !failed) break;
    ASSERT_LT(n, 1000u);
  }
}

TEST_F(DiskFaultsTest, ADiskThatFailsForGoodHasTheStepWholeOrNotAtAll) {
  uint64_t dropped = 0;
  for (uint64_t n = 1;; ++n) {
    Place place;
    std::optional<SystemCall> failed;
    Result<StepRecord> kept = [&] {
      const WatchedIo watch(n, WatchedIo::Faults::kFromThereOn);
      auto done = place.Keep(milliseconds(0));
      failed = watch.failed();
      return done;
    }();
    SCOPED_TRACE(failed ? failed->name + " " + failed->path : "nothing failed");
    const bool there = IsStepThere(place.storage, "3", 3, 2);  // and whole
    if (kept) {
      EXPECT_TRUE(there);
    } else {
      ++dropped;
      EXPECT_EQ(kept.error().code, ErrorCode::kIo) << kept.error().message;
      EXPECT_FALSE(kept.error().message.empty());
    }
    EXPECT_TRUE(place.HasNothingHalf());
    if (HasFailure() || !failed) break;
    ASSERT_LT(n, 1000u);
  }
  EXPECT_GT(dropped, 10u);
}

TEST_F(DiskFaultsTest, ASpoolHasASaveWholeOrNotAtAll) {
  uint64_t refused = 0;
  for (uint64_t n = 1;; ++n) {
    const TemporaryDirectory directory;
    const std::string path = directory.path() + "/spool";
    const Save save(3);
    std::optional<SystemCall> failed;
    {
      auto opened = Spool::Open(path, "store");
      ASSERT_TRUE(opened) << opened.error().message;
      Status written;
      {
        const WatchedIo watch(n);
        written = opened->spool->Write(save.part(), *save.bytes);
        failed = watch.failed();
      }
      SCOPED_TRACE(failed ? failed->name + " " + failed->path : "nothing failed");
      if (written) ExpectWhole(*opened->spool->files(), save.part());
      if (!written) {
        ++refused;
        EXPECT_EQ(written.error().code, ErrorCode::kIo);
        EXPECT_THAT(*ListFilesBelow(FileRoot(path), ""), ElementsAre("format"));
        EXPECT_TRUE(opened->spool->Write(save.part(), *save.bytes));
      }
    }
    auto again = Spool::Open(path, "store");
    ASSERT_TRUE(again) << again.error().message;
    ASSERT_EQ(again->left.size(), 1u);
    ExpectWhole(*again->spool->files(), again->left[0]);
    if (HasFailure() || !failed) break;
    ASSERT_LT(n, 1000u);
  }
  EXPECT_GT(refused, 5u);
}

}  // namespace
}  // namespace ckptfs
