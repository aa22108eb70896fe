// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/placements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/torch/pickle_writer.h"

namespace ckptfs::rank_shards {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kModule = "torch.distributed.tensor.placement_types";

Placement Cut(uint64_t dim, uint64_t factor = 1) { return {dim, factor}; }

// Begin and length along dim 0 of what each rank of a mesh holds of `rows` rows, row-major.
std::vector<std::pair<uint64_t, uint64_t>> Rows(const std::vector<Placement>& placements,
                                                const std::vector<uint64_t>& mesh, uint64_t rows) {
  const CutOrder order = OrderOfCuts(placements, 1, mesh).value();
  std::vector<std::pair<uint64_t, uint64_t>> out;
  uint64_t count = 1;
  for (const uint64_t size : mesh) count *= size;
  for (uint64_t rank = 0; rank < count; ++rank) {
    std::vector<uint64_t> coordinate(mesh.size());
    uint64_t rest = rank;
    for (size_t d = mesh.size(); d-- > 0; rest /= mesh[d]) coordinate[d] = rest % mesh[d];
    const ShardBox box = BoxAt({rows}, order, mesh, coordinate);
    out.emplace_back(box.begin[0], box.shape[0]);
  }
  return out;
}

using Pairs = std::vector<std::pair<uint64_t, uint64_t>>;

// The rows that live ranks of FSDP2 over tensor parallelism held (torch 2.13, mesh fsdp x tp).
TEST(PlacementsTest, StridedShardsAreCutAsFsdp2CutsThem) {
  const std::vector<Placement> both = {Cut(0, 2), Cut(0)};
  const std::vector<uint64_t> mesh = {2, 2};
  EXPECT_EQ(Rows(both, mesh, 8), (Pairs{{0, 2}, {4, 2}, {2, 2}, {6, 2}}));
  EXPECT_EQ(Rows(both, mesh, 9), (Pairs{{0, 3}, {5, 2}, {3, 2}, {7, 2}}));
  EXPECT_EQ(Rows(both, mesh, 10), (Pairs{{0, 3}, {5, 3}, {3, 2}, {8, 2}}));
  EXPECT_EQ(Rows(both, mesh, 11), (Pairs{{0, 3}, {6, 3}, {3, 3}, {9, 2}}));
  EXPECT_EQ(Rows(both, mesh, 3), (Pairs{{0, 1}, {2, 1}, {1, 1}, {3, 0}}));
}

TEST(PlacementsTest, ShardsAreCutFromLeftToRight) {
  EXPECT_EQ(Rows({Cut(0), Cut(0)}, {2, 2}, 8), (Pairs{{0, 2}, {2, 2}, {4, 2}, {6, 2}}));
  EXPECT_EQ(Rows({Cut(0)}, {4}, 5), (Pairs{{0, 2}, {2, 2}, {4, 1}, {5, 0}}));
  EXPECT_EQ(Rows({Placement{}, Cut(0)}, {2, 2}, 3), (Pairs{{0, 2}, {2, 1}, {0, 2}, {2, 1}}));
  EXPECT_EQ(Rows({Cut(0)}, {1}, 3), (Pairs{{0, 3}}));
  EXPECT_EQ(Rows({Cut(0)}, {3}, 0), (Pairs{{0, 0}, {0, 0}, {0, 0}}));
}

// Three mesh dims: the factor says after which of the others it comes.
TEST(PlacementsTest, AFactorStandsBehindTheMeshDimsThatGiveIt) {
  EXPECT_THAT(OrderOfCuts({Cut(0, 6), Cut(0, 3), Cut(0)}, 1, {2, 2, 3}).value()[0],
              ElementsAre(2, 1, 0));
  EXPECT_THAT(OrderOfCuts({Cut(0, 2), Cut(0), Cut(0)}, 1, {2, 2, 3}).value()[0],
              ElementsAre(1, 0, 2));
  const auto odd = OrderOfCuts({Cut(0, 4), Cut(0)}, 1, {2, 3});
  ASSERT_FALSE(odd);
  EXPECT_THAT(odd.error().message, HasSubstr("split_factor 4"));
  EXPECT_FALSE(OrderOfCuts({Cut(1)}, 1, {2}));
  EXPECT_FALSE(OrderOfCuts({Cut(0)}, 1, {2, 2}));
}

// A DTensorSpec with these placements, each of a class with a state.
struct Spec {
  PickleBuilder builder;
  std::vector<NodeId> placements;
  std::vector<std::pair<NodeId, NodeId>> more;

  void Add(std::string_view name, const std::vector<std::pair<std::string, int64_t>>& state) {
    std::vector<std::pair<NodeId, NodeId>> items;
    for (const auto& [key, value] : state) {
      const NodeId text = builder.String(key);
      items.emplace_back(text, builder.Int(value));
    }
    const NodeId cls = builder.Global(kModule, name);
    const NodeId arguments = builder.Tuple({});
    placements.push_back(builder.Object(cls, arguments, builder.Dict(items)));
  }
  PickleTree Finish() {
    std::vector<std::pair<NodeId, NodeId>> items = more;
    const NodeId key = builder.String("placements");
    items.emplace_back(key, builder.Tuple(placements));
    const NodeId root = builder.Dict(items);
    return std::move(builder).Finish(root);
  }
};

TEST(PlacementsTest, ClassesAreReadByName) {
  Spec spec;
  spec.Add("Replicate", {});
  spec.Add("_StridedShard", {{"dim", 1}, {"split_factor", 2}});
  spec.Add("Shard", {{"dim", 1}});
  const PickleTree tree = spec.Finish();
  EXPECT_THAT(ReadPlacements(RootOf(tree)).value(), ElementsAre(Placement{}, Cut(1, 2), Cut(1)));
}

TEST(PlacementsTest, OthersAreRefusedByName) {
  for (const auto& [name, state] :
       std::vector<std::pair<std::string, std::vector<std::pair<std::string, int64_t>>>>{
           {"Partial", {}},
           {"Shard", {}},
           {"Shard", {{"dim", -1}}},
           {"_StridedShard", {{"dim", 0}, {"split_factor", 0}}}}) {
    Spec spec;
    spec.Add(name, state);
    const PickleTree tree = spec.Finish();
    const auto read = ReadPlacements(RootOf(tree));
    ASSERT_FALSE(read) << name;
    EXPECT_THAT(read.error().message, HasSubstr(name));
  }
}

TEST(PlacementsTest, AnotherOrderThanThePlacementsIsRefused) {
  Spec spec;
  const NodeId dim = spec.builder.Int(0);
  const NodeId first = spec.builder.Int(1);
  const NodeId second = spec.builder.Int(0);
  const NodeId dims = spec.builder.Tuple({first, second});
  const NodeId entry = spec.builder.Tuple({dim, dims});
  const NodeId list = spec.builder.Tuple({entry});
  const NodeId key = spec.builder.String("shard_order");
  spec.more.emplace_back(key, list);
  const PickleTree tree = spec.Finish();
  const std::vector<uint64_t> mesh = {2, 2};
  EXPECT_FALSE(CheckOrder(RootOf(tree), OrderOfCuts({Cut(0), Cut(0)}, 1, mesh).value()));
  EXPECT_TRUE(CheckOrder(RootOf(tree), OrderOfCuts({Cut(0, 2), Cut(0)}, 1, mesh).value()));
}

}  // namespace
}  // namespace ckptfs::rank_shards
