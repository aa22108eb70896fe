// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using testing::TreeFixture;

// The target of /view, or "" if it is absent.
std::string View(TreeFixture& t) {
  const auto link = t.fs().Lookup(kRootInode, "view", {});
  return link ? t.fs().ReadLink(link->inode, {}).value() : "";
}

TEST(ViewLinkTest, ShowsTheLatestStepAndStaysThere) {
  TreeFixture t;
  t.AddStep("r", "b", 7);
  t.AddStep("r", "a", 3);
  t.Mount();
  EXPECT_EQ(View(t), "run/r/step/b/view");
  t.AddStep("r", "c", 9);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/b/view");
}

TEST(ViewLinkTest, IsAbsentUntilThereIsAStep) {
  TreeFixture t;
  t.Mount();
  EXPECT_EQ(View(t), "");
  t.AddStep("r", "a", 1);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/a/view");
  t.AddStep("r", "b", 2);
  t.AddStep("other", "c", 3);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/a/view");
}

TEST(ViewLinkTest, SeveralRunsNeedAChoice) {
  TreeFixture t;
  t.AddStep("r", "a", 1);
  t.AddStep("q", "b", 2);
  t.Mount();
  EXPECT_EQ(View(t), "");
  EXPECT_THAT(t.Log(), ::testing::Contains(::testing::HasSubstr("several runs")));
  EXPECT_FALSE(t.fs().SwitchView("nobody", "latest"));
  EXPECT_FALSE(t.fs().SwitchView("r", "nothing"));
  ASSERT_TRUE(t.fs().SwitchView("r", "latest"));
  EXPECT_EQ(View(t), "run/r/step/a/view");
  ASSERT_TRUE(t.fs().SwitchView("q", "b"));
  EXPECT_EQ(View(t), "run/q/step/b/view");
}

TEST(ViewLinkTest, RunAndStepOptionsChoose) {
  TreeFixture t;
  t.AddStep("r", "a", 1);
  t.AddStep("r", "b", 2);
  t.AddStep("q", "c", 3);
  FilesystemOptions options;
  options.run = "r";
  t.Mount(options);
  EXPECT_EQ(View(t), "run/r/step/b/view");
  options.step = "a";
  t.Mount(options);
  EXPECT_EQ(View(t), "run/r/step/a/view");
  options.step = "later";
  t.Mount(options);
  EXPECT_EQ(View(t), "");
  t.AddStep("r", "later", 4);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/later/view");
}

TEST(ViewLinkTest, FollowMovesWithTheRun) {
  TreeFixture t;
  t.AddStep("r", "a", 1);
  FilesystemOptions options;
  options.follow = true;
  t.Mount(options);
  const auto before = t.fs().Lookup(kRootInode, "view", {})->inode;
  t.AddStep("r", "b", 2);
  t.AddStep("q", "c", 3);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/b/view");
  EXPECT_NE(before, t.fs().Lookup(kRootInode, "view", {})->inode) << "a link never changes";
  ASSERT_TRUE(t.fs().SwitchView("r", "a"));
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/a/view");
  ASSERT_TRUE(t.fs().SwitchView("r", "latest"));
  t.AddStep("r", "d", 4);
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "run/r/step/d/view") << "it does not follow again";
}

TEST(ViewLinkTest, NeverMovesToAnotherStepWhenItsOwnIsRemoved) {
  TreeFixture t;
  t.AddStep("r", "a", 1);
  const StepRecord shown = t.AddStep("r", "b", 2);
  t.Mount();
  EXPECT_EQ(View(t), "run/r/step/b/view");
  ASSERT_TRUE(t.store().Remove(shown));
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "");
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_EQ(View(t), "");
  ASSERT_TRUE(t.fs().SwitchView("r", "latest"));
  EXPECT_EQ(View(t), "run/r/step/a/view");
}

}  // namespace
}  // namespace ckptfs
