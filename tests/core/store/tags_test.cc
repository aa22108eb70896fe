// SPDX-License-Identifier: Apache-2.0
//
// Names that users give: tags of steps, and runs that get another name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/base/strings.h"
#include "core/store/lives.h"
#include "core/store/store.h"
#include "tests/core/store/sample_model.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::TinyModel;

class NamesTest : public testing::Test {
 protected:
  NamesTest() : store_(Open()) {}
  std::unique_ptr<Store> Open() const { return *Store::Open(directory_.path() + "/store", true); }
  StepRecord Publish(const std::string& id, uint64_t iteration, const std::string& run = "run",
                     uint64_t seed = 0) {
    PublishHow how;
    how.replace = true;
    const auto record =
        store_->Publish(run, TinyModel(id, iteration, static_cast<int64_t>(iteration), seed),
                        StrCat("/r/", id), "/r", how);
    EXPECT_TRUE(record) << record.error().message;
    return *record;
  }
  std::vector<std::string> TagNames(std::string_view run = "run") {
    std::vector<std::string> names;
    const auto tags = Open()->Tags(run);
    EXPECT_TRUE(tags);
    for (const StepTag& tag : *tags) names.push_back(StrCat(tag.name, "=", tag.id));
    return names;
  }
  std::vector<std::string> Ids(Store& store, const std::string& run) {
    std::vector<std::string> ids;
    const auto steps = store.Steps(run);
    if (steps) {
      for (const StepRecord& step : *steps) ids.push_back(step.id);
    }
    return ids;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Store> store_;
};

TEST_F(NamesTest, ATagIsResolvedAndMovesAndGoes) {
  const StepRecord one = Publish("s1", 1), two = Publish("s2", 2);
  ASSERT_TRUE(store_->Tag(one, "best"));
  ASSERT_TRUE(store_->Tag(one, "best"));
  EXPECT_EQ(store_->Resolve("run", "best")->id, "s1");
  EXPECT_EQ(Open()->Resolve("run", "best")->id, "s1");
  ASSERT_TRUE(store_->Tag(one, "first"));
  ASSERT_TRUE(store_->Tag(two, "best"));
  EXPECT_EQ(store_->Resolve("run", "best")->id, "s2");
  EXPECT_THAT(TagNames(), ElementsAre("best=s2", "first=s1"));
  ASSERT_TRUE(store_->Untag("run", "best"));
  EXPECT_EQ(store_->Resolve("run", "best").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(store_->Untag("run", "best").error().code, ErrorCode::kNotFound);
  EXPECT_THAT(TagNames(), ElementsAre("first=s1"));
  ASSERT_TRUE(store_->Tag(two, "best"));
  EXPECT_EQ(store_->Resolve("run", "best")->id, "s2");
}

TEST_F(NamesTest, NamesFollowTheRulesOfRuns) {
  const StepRecord one = Publish("s1", 1);
  for (const std::string name : {"", ".", "..", "a/b", "a\nb", "latest"}) {
    EXPECT_EQ(store_->Tag(one, name).error().code, ErrorCode::kInvalid) << name;
    EXPECT_FALSE(store_->RenameRun("run", name == "latest" ? ".." : name)) << name;
  }
  EXPECT_EQ(store_->Tag(one, std::string(201, 'x')).error().code, ErrorCode::kInvalid);
  EXPECT_EQ(store_->Tag(one, "s1").error().code, ErrorCode::kExists);
  EXPECT_TRUE(store_->Tag(one, "caf\xc3\xa9 \xff 100%"));
  EXPECT_EQ(Open()->Resolve("run", "caf\xc3\xa9 \xff 100%")->id, "s1");
}

// A step's own name goes before a tag, and a tag means the step that it was given to.
TEST_F(NamesTest, ATagNeverMeansAnotherStep) {
  const StepRecord one = Publish("s1", 1);
  ASSERT_TRUE(store_->Tag(one, "best"));
  Publish("s1", 1, "run", 7);  // replaced by other bytes
  const auto stale = store_->Resolve("run", "best");
  ASSERT_FALSE(stale);
  EXPECT_EQ(stale.error().code, ErrorCode::kStale);
  EXPECT_THAT(stale.error().message, HasSubstr("tag 'best'"));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("run", "s1")));
  Publish("s2", 2);
  EXPECT_EQ(store_->Resolve("run", "best").error().code, ErrorCode::kNotFound);
  const StepRecord own = Publish("best", 3);
  EXPECT_EQ(store_->Resolve("run", "best")->manifest, own.manifest);
}

TEST_F(NamesTest, ARunIsRenamedWithItsTags) {
  const StepRecord one = Publish("s1", 1), two = Publish("s2", 2);
  ASSERT_TRUE(store_->Tag(one, "best"));
  const auto moved = store_->RenameRun("run", "new name");
  ASSERT_TRUE(moved) << moved.error().message;
  EXPECT_EQ(*moved, 2u);
  for (Store* store : {store_.get(), Open().release()}) {
    const std::unique_ptr<Store> owner(store == store_.get() ? nullptr : store);
    EXPECT_THAT(*store->Runs(), ElementsAre("new name"));
    EXPECT_THAT(Ids(*store, "new name"), ElementsAre("s1", "s2"));
    EXPECT_EQ(store->Resolve("new name", "best")->id, "s1");
    EXPECT_EQ(store->Resolve("new name", "latest")->manifest, two.manifest);
    EXPECT_TRUE(store->Load(*store->Resolve("new name", "s1")));
  }
  EXPECT_THAT(TagNames("run"), IsEmpty());
  EXPECT_EQ(store_->RenameRun("run", "x").error().code, ErrorCode::kNotFound);
  // Its name is free, for another root as well.
  EXPECT_TRUE(store_->Publish("run", TinyModel("s9", 9, 9), "/q/s9", "/q"));
  // It belongs to the root that it had.
  EXPECT_FALSE(store_->Publish("new name", TinyModel("s9", 9, 9), "/q/s9", "/q"));
}

TEST_F(NamesTest, ATakenNameIsRefused) {
  Publish("s1", 1);
  Publish("s1", 1, "other");
  const auto refused = store_->RenameRun("run", "other");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kExists);
  EXPECT_THAT(Ids(*store_, "run"), ElementsAre("s1"));
  EXPECT_FALSE(store_->RenameRun("run", "run"));
}

TEST_F(NamesTest, ARunOfSnapshotsBelongsToItsNewName) {
  ASSERT_TRUE(store_->Publish("job", TinyModel("1", 1, 1), "", StrCat(kSnapshotRoot, "job")));
  ASSERT_TRUE(store_->RenameRun("job", "later"));
  EXPECT_TRUE(store_->Publish("later", TinyModel("2", 2, 2), "", StrCat(kSnapshotRoot, "later")));
}

// Killed anywhere, each step is under one name at least, and the same call finishes.
TEST_F(NamesTest, ARenameThatWasKilledIsFinished) {
  for (int i = 1; i <= 3; ++i) Publish(StrCat("s", i), static_cast<uint64_t>(i));
  ASSERT_TRUE(store_->Tag(*store_->Resolve("run", "s2"), "best"));
  int kills = 0;
  for (int point = 1; point < 50; ++point) {
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("CKPTFS_KILL_AT", StrCat(point).c_str(), 1);
      _exit(Open()->RenameRun("run", "new") ? 0 : 1);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    const auto store = Open();
    std::set<std::string> all;
    for (const std::string run : {"run", "new"}) {
      for (const std::string& id : Ids(*store, run)) all.insert(id);
    }
    EXPECT_THAT(all, ElementsAre("s1", "s2", "s3")) << point;
    if (!WIFSIGNALED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0) << point;
      break;
    }
    ++kills;
    // Nobody else may take what is under way.
    EXPECT_EQ(store->RenameRun("run", "elsewhere").error().code, ErrorCode::kExists);
  }
  EXPECT_GE(kills, 4);
  const auto store = Open();
  EXPECT_THAT(*store->Runs(), ElementsAre("new"));
  EXPECT_EQ(store->Resolve("new", "best")->id, "s2");
}

}  // namespace
}  // namespace ckptfs
