// SPDX-License-Identifier: Apache-2.0
#include "core/state/run_listings.h"

#include <gtest/gtest.h>

#include "core/io/file_root.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

// "a1" is number 1 of the run "a".
std::optional<RunListings::Numbered> Numbered(std::string_view name) {
  if (name.size() != 2 || name[1] < '0' || name[1] > '9') return std::nullopt;
  return RunListings::Numbered{name.substr(0, 1), static_cast<uint64_t>(name[1] - '0')};
}

TEST(RunListingsTest, ADirectoryIsListedOnceAndHasItsRunsApart) {
  const TemporaryDirectory directory;
  for (const char* path : {"a1/x", "a3/x", "b2/x", "other/x"}) directory.Write(path, "");
  directory.Write("a2", "a file");
  const WatchedRoot root(std::make_shared<FileRoot>(directory.path()));
  RunListings listings;
  const auto run = listings.StepsOf(root, "", "a", Numbered);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(**run, (RunListings::Steps{{1, "a1"}, {3, "a3"}}));
  EXPECT_EQ(**listings.StepsOf(root, "", "b", Numbered), (RunListings::Steps{{2, "b2"}}));
  EXPECT_TRUE((*listings.StepsOf(root, "", "none", Numbered))->empty());
  (*run)->erase({3, "a3"});
  EXPECT_EQ((*listings.StepsOf(root, "", "a", Numbered))->size(), 1u);
  EXPECT_EQ(root.calls().size(), 1u);
}

TEST(RunListingsTest, AnErrorIsRepeated) {
  const TemporaryDirectory directory;
  const WatchedRoot root(std::make_shared<FileRoot>(directory.path()));
  RunListings listings;
  for (int i = 0; i < 2; ++i) {
    const auto run = listings.StepsOf(root, "none", "a", Numbered);
    ASSERT_FALSE(run);
    EXPECT_EQ(run.error().code, ErrorCode::kNotFound);
  }
  EXPECT_EQ(root.calls().size(), 1u);
}

}  // namespace
}  // namespace ckptfs
