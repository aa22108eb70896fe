// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/box_runs.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

namespace ckptfs {
namespace {

using Runs = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

Runs Collect(const BoxRuns& runs, uint64_t begin, uint64_t end) {
  Runs found;
  runs.ForEach(begin, end, [&](uint64_t target, uint64_t source, uint64_t count) {
    found.emplace_back(target, source, count);
    return true;
  });
  return found;
}

Piece Whole(const Shape& shape) { return WholeTensor(shape).pieces[0]; }

TEST(BoxRuns, EqualLayoutsAreOneRun) {
  const auto runs = BoxRuns::Intersect(Whole({3, 4, 5}), Whole({3, 4, 5}));
  ASSERT_TRUE(runs);
  EXPECT_EQ(Collect(*runs, 0, 60), (Runs{{0, 0, 60}}));
  EXPECT_EQ(Collect(*runs, 7, 9), (Runs{{7, 7, 2}}));
  EXPECT_EQ(Collect(*runs, 60, 70), Runs{});
}

TEST(BoxRuns, ColumnSliceOfRows) {
  const Piece slice{{4, 2}, {0, 3}, 0, {2, 1}, 1.0};
  const auto runs = BoxRuns::Intersect(slice, Whole({4, 8}));
  ASSERT_TRUE(runs);
  EXPECT_EQ(Collect(*runs, 0, 8), (Runs{{0, 3, 2}, {2, 11, 2}, {4, 19, 2}, {6, 27, 2}}));
  EXPECT_EQ(Collect(*runs, 3, 5), (Runs{{3, 12, 1}, {4, 19, 1}}));
}

TEST(BoxRuns, DisjointAndEmptyBoxesDoNotMeet) {
  const Piece low{{2}, {0}, 0, {1}, 1.0};
  const Piece high{{2}, {2}, 0, {1}, 1.0};
  EXPECT_FALSE(BoxRuns::Intersect(low, high));
  EXPECT_FALSE(BoxRuns::Intersect(Whole({0, 3}), Whole({0, 3})));
}

TEST(BoxRuns, ScalarsAreOneElement) {
  const auto runs = BoxRuns::Intersect(Whole({}), Whole({}));
  ASSERT_TRUE(runs);
  EXPECT_EQ(Collect(*runs, 0, 1), (Runs{{0, 0, 1}}));
}

TEST(BoxRuns, TransposedSourceIsStrided) {
  const Piece transposed{{2, 3}, {0, 0}, 0, {1, 2}, 1.0};  // stored column by column
  const auto runs = BoxRuns::Intersect(Whole({2, 3}), transposed);
  ASSERT_TRUE(runs);
  EXPECT_EQ(runs->source_stride(), 2u);
  EXPECT_EQ(Collect(*runs, 0, 6), (Runs{{0, 0, 3}, {3, 1, 3}}));
}

// A window of a huge tensor costs its own runs: with a walk over the box this
// test would not end.
TEST(BoxRuns, WindowOfAHugeTensorSkipsTheRest) {
  const uint64_t rows = uint64_t{1} << 40;
  const Piece slice{{rows, 4}, {0, 0}, 0, {4, 1}, 1.0};
  const auto runs = BoxRuns::Intersect(slice, Whole({rows, 8}));
  ASSERT_TRUE(runs);
  const uint64_t middle = rows * 2;
  EXPECT_EQ(Collect(*runs, middle, middle + 8),
            (Runs{{middle, middle * 2, 4}, {middle + 4, middle * 2 + 8, 4}}));
}

TEST(BoxRuns, StopsWhenAsked) {
  const Piece slice{{100, 2}, {0, 0}, 0, {2, 1}, 1.0};
  const auto runs = BoxRuns::Intersect(slice, Whole({100, 4}));
  int seen = 0;
  EXPECT_FALSE(runs->ForEach(0, 200, [&](uint64_t, uint64_t, uint64_t) { return ++seen < 3; }));
  EXPECT_EQ(seen, 3);
}

}  // namespace
}  // namespace ckptfs
