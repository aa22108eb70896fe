// SPDX-License-Identifier: Apache-2.0

#include "core/view/view_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ckptfs {
namespace {

using testing::ElementsAre;

ViewTree::Text Text(const char* text) { return std::make_shared<const std::string>(text); }

std::shared_ptr<ViewTree> MakeTree() {
  auto step = std::make_shared<StepModel>();
  step->blobs.resize(1);
  step->blobs[0].stamp.size = 5;
  return std::make_shared<ViewTree>(ShownState::Of(std::move(step), Layout{}));
}

std::vector<std::string> NamesIn(const View& view, std::string_view directory) {
  std::vector<std::string> names;
  const auto entries = view.List(directory);
  if (!entries) return {entries.error().message};
  for (const ViewEntry& entry : *entries) names.push_back(entry.name);
  return names;
}

TEST(ViewTreeTest, FoldersAreThereAsFarAsPathsNameThem) {
  const auto tree = MakeTree();
  tree->AddText("top/b/x", Text("x"));
  tree->AddText("top/b-c", Text("yy"));
  tree->AddBlob("top/a", BlobIndex{0}, Reading::kMapped);
  EXPECT_THAT(NamesIn(*tree, ""), ElementsAre("top"));
  EXPECT_THAT(NamesIn(*tree, "top"), ElementsAre("a", "b-c", "b"));
  EXPECT_EQ(tree->Find("top/b")->type, ViewEntry::Type::kDirectory);
  EXPECT_EQ(tree->Find("top/a")->size, 5u);
  EXPECT_EQ(tree->MakePlan("top/a")->size(), 5u);
  EXPECT_EQ(tree->MakePlan("top/b-c")->size(), 2u);
  for (const char* path : {"", "top/", "top/b/", "top/b/y", "top/a/x", "to"}) {
    EXPECT_FALSE(tree->Find(path)) << path;
    EXPECT_FALSE(tree->MakePlan(path)) << path;
  }
  for (const char* path : {"top/a", "top/", "other"}) EXPECT_FALSE(tree->List(path)) << path;
}

TEST(ViewTreeTest, WhatIsAddedTakesThePlaceOfWhatStoodThere) {
  const auto tree = MakeTree();
  tree->AddText("a/one", Text("1"));
  tree->AddText("a/two", Text("2"));
  tree->AddText("ab", Text("3"));
  tree->AddText("a", Text("file"));
  EXPECT_THAT(NamesIn(*tree, ""), ElementsAre("a", "ab"));
  EXPECT_EQ(tree->Find("a")->size, 4u);
  tree->Remove([](std::string_view path) { return path == "ab"; });
  EXPECT_FALSE(tree->Has("ab"));
  EXPECT_TRUE(tree->Any([](std::string_view path) { return path == "a"; }));
}

TEST(ViewTreeTest, APartIsAnotherViewsUnderAnotherName) {
  const auto inner = MakeTree();
  inner->AddText("deep/tag/file", Text("content"));
  inner->LeaveOut("of the part");
  const auto tree = MakeTree();
  tree->LeaveOut("of its own");
  ASSERT_TRUE(tree->AddPart("top/mine", inner, "deep/tag"));
  ASSERT_TRUE(tree->AddPart("top/again", inner, "deep/tag/file"));
  EXPECT_FALSE(tree->AddPart("top/absent", inner, "deep/no"));
  EXPECT_THAT(NamesIn(*tree, "top"), ElementsAre("again", "mine"));
  EXPECT_THAT(NamesIn(*tree, "top/mine"), ElementsAre("file"));
  EXPECT_EQ(tree->Find("top/mine")->name, "mine");
  EXPECT_EQ(tree->Find("top/mine")->type, ViewEntry::Type::kDirectory);
  EXPECT_EQ(tree->Find("top/again")->name, "again");
  EXPECT_EQ(tree->MakePlan("top/mine/file")->size(), 7u);
  EXPECT_EQ(tree->MakePlan("top/again")->size(), 7u);
  EXPECT_FALSE(tree->MakePlan("top/mine"));
  EXPECT_FALSE(tree->Find("top/mine/no"));
  EXPECT_FALSE(tree->Find("top/minefile"));
  EXPECT_THAT(tree->LeftOut(), ElementsAre("of its own", "of the part"));
  EXPECT_GT(tree->MemoryBytes(), inner->MemoryBytes());
}

TEST(ViewTreeTest, APlanIsMadeWhenTheFileIsRead) {
  const auto tree = MakeTree();
  int made = 0;
  const uint64_t before = tree->MemoryBytes();
  tree->AddMade(
      "made", 3, Reading::kCopied,
      [&made]() -> Result<Plan> {
        ++made;
        PlanBuilder plan;
        plan.Zeros(3);
        return std::move(plan).Finish();
      },
      1000);
  EXPECT_EQ(tree->Find("made")->size, 3u);
  EXPECT_EQ(made, 0);
  EXPECT_EQ(tree->MakePlan("made")->size(), 3u);
  EXPECT_EQ(made, 1);
  EXPECT_GT(tree->MemoryBytes(), before + 1000);
}

}  // namespace
}  // namespace ckptfs
