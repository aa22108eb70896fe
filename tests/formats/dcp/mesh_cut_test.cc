// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/mesh_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

namespace ckptfs::dcp {
namespace {

using testing::ElementsAre;

// Every element of the tensor is in one box, and each box is where its rank asks.
void ExpectAPartition(const Shape& shape, std::optional<uint32_t> tp_dim, const Mesh& mesh) {
  const MeshCut cut(shape, tp_dim, mesh);
  std::map<Shape, int> covered;
  std::map<uint64_t, uint64_t> box_of_rank;
  for (uint64_t i = 0; i < cut.count(); ++i) {
    const MeshCut::Box box = cut.At(i);
    EXPECT_TRUE(box_of_rank.emplace(box.rank, i).second) << "two boxes of rank " << box.rank;
    EXPECT_LT(box.rank, mesh.ranks());
    ASSERT_EQ(box.shape.size(), 2u);
    for (uint64_t r = 0; r < box.shape[0]; ++r) {
      for (uint64_t c = 0; c < box.shape[1]; ++c) ++covered[{box.begin[0] + r, box.begin[1] + c}];
    }
    EXPECT_GT(box.shape[0] * box.shape[1], 0u);
    const auto sample = cut.Samples()[cut.KindOf(i)];
    ASSERT_TRUE(sample);
    EXPECT_EQ(cut.KindOf(*sample), cut.KindOf(i));
    EXPECT_EQ(cut.At(*sample).shape, box.shape);
  }
  EXPECT_EQ(covered.size(), shape[0] * shape[1]);
  for (const auto& [at, times] : covered) {
    EXPECT_EQ(times, 1);
    EXPECT_TRUE(at[0] < shape[0] && at[1] < shape[1]);
  }
  for (uint64_t rank = 0; rank < mesh.ranks(); ++rank) {
    const auto found = box_of_rank.find(rank);
    EXPECT_EQ(cut.IndexOf(rank),
              found == box_of_rank.end() ? std::nullopt : std::optional(found->second));
  }
}

TEST(MeshCutTest, CoversEveryElementOnce) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    const Shape shape = {1 + random() % 20, 1 + random() % 9};
    const Mesh mesh{1 + random() % 5, 1 + random() % 7};
    std::optional<uint32_t> dim;
    if (random() % 3 != 0) dim = static_cast<uint32_t>(random() % 2);
    SCOPED_TRACE(testing::Message() << ShapeToString(shape) << " tp" << mesh.tp << " shards "
                                    << mesh.shards << " dim " << (dim ? int(*dim) : -1));
    ExpectAPartition(shape, dim, mesh);
  }
}

TEST(MeshCutTest, RowsAreThoseOfTorchChunk) {
  const MeshCut four({7, 3}, std::nullopt, {1, 4});
  ASSERT_EQ(four.count(), 4u);
  EXPECT_THAT(four.At(0).shape, ElementsAre(2, 3));
  EXPECT_THAT(four.At(3).begin, ElementsAre(6, 0));
  EXPECT_THAT(four.At(3).shape, ElementsAre(1, 3));
  // Five rows on four ranks: two, two, one, none.
  const MeshCut short_of_one({5, 3}, std::nullopt, {1, 4});
  EXPECT_EQ(short_of_one.count(), 3u);
  EXPECT_FALSE(short_of_one.IndexOf(3));
}

TEST(MeshCutTest, TensorParallelismCutsFirst) {
  const MeshCut rows({10, 4}, 0, {2, 2});  // 5 + 5, each 3 + 2
  EXPECT_THAT(rows.At(*rows.IndexOf(1)).begin, ElementsAre(5, 0));
  EXPECT_THAT(rows.At(*rows.IndexOf(2)).begin, ElementsAre(3, 0));
  EXPECT_THAT(rows.At(*rows.IndexOf(3)).begin, ElementsAre(8, 0));
  EXPECT_THAT(rows.At(*rows.IndexOf(3)).shape, ElementsAre(2, 4));
  const MeshCut columns({10, 4}, 1, {2, 2});
  EXPECT_THAT(columns.At(*columns.IndexOf(3)).begin, ElementsAre(5, 2));
  EXPECT_THAT(columns.At(*columns.IndexOf(3)).shape, ElementsAre(5, 2));
  // All ranks read a dimension that the mesh does not cut; it lies with the first of them.
  const MeshCut neither({10, 4}, std::nullopt, {2, 2});
  EXPECT_EQ(neither.count(), 2u);
  EXPECT_FALSE(neither.IndexOf(1));
  EXPECT_EQ(neither.At(1).rank, 2u);
}

TEST(MeshCutTest, WhatHasNoRowsIsOneBox) {
  for (const Shape& shape : {Shape{}, Shape{0, 4}, Shape{3}}) {
    const MeshCut cut = MeshCut::Whole(shape);
    EXPECT_EQ(cut.count(), 1u);
    EXPECT_EQ(cut.At(0).shape, shape);
    EXPECT_EQ(cut.At(0).rank, 0u);
  }
}

}  // namespace
}  // namespace ckptfs::dcp
