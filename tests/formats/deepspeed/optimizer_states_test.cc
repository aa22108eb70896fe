// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/optimizer_states.h"

#include <gmock/gmock.h>

#include "formats/deepspeed/torch_optimizer.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::deepspeed {
namespace {

using testing::HasSubstr;

constexpr int64_t kMany = 5000;

// A file without tensors.
struct Pickled {
  PickleBuilder pickle;

  NodeId Numbers(int64_t count) {
    std::vector<NodeId> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(pickle.Int(i));
    return pickle.List(out);
  }
  NodeId Group(NodeId setting, NodeId members) {
    return pickle.Dict({{pickle.String("lr"), setting}, {pickle.String("params"), members}});
  }
  // The same group `count` times.
  NodeId Groups(NodeId group, size_t count) {
    return pickle.List(std::vector<NodeId>(count, group));
  }
  TorchFile File(NodeId root) && {
    return TorchFile::Make(std::move(pickle).Finish(root), {}).value();
  }
};

Result<std::vector<HyperGroup>> Read(const TorchFile& file) {
  CopyBudget budget(file.tree());
  return ReadHyperGroups(file.root(), file, budget);
}

TEST(HyperGroupsTest, GroupsOfTheirOwnCostWhatThePickleHas) {
  Pickled made;
  std::vector<NodeId> groups;
  for (int g = 0; g < 3; ++g) groups.push_back(made.Group(made.pickle.Int(g), made.Numbers(kMany)));
  const NodeId root = made.pickle.List(groups);
  const TorchFile file = std::move(made).File(root);
  CopyBudget budget(file.tree());
  const uint64_t before = budget.left();
  const auto read = ReadHyperGroups(file.root(), file, budget);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->size(), 3u);
  EXPECT_EQ(read->back().members.size(), size_t{kMany});
  EXPECT_LT(before - budget.left(), (before - CopyBudget::kAlways) / CopyBudget::kTimes);
}

TEST(HyperGroupsTest, OneGroupMentionedOftenIsRefused) {
  Pickled made;
  const NodeId root = made.Groups(made.Group(made.pickle.Int(1), made.Numbers(kMany)), kMany);
  const auto read = Read(std::move(made).File(root));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(read.error().message, HasSubstr("mentioned often"));
}

TEST(HyperGroupsTest, OneSettingMentionedOftenIsRefused) {
  Pickled groups;
  const NodeId setting = groups.Numbers(kMany);
  const NodeId root = groups.Groups(groups.Group(setting, groups.Numbers(1)), kMany);
  EXPECT_FALSE(Read(std::move(groups).File(root)));
  Pickled keys;
  const NodeId value = keys.Numbers(kMany);
  std::vector<std::pair<NodeId, NodeId>> items;
  for (int64_t i = 0; i < kMany; ++i) items.emplace_back(keys.pickle.Int(i), value);
  const NodeId one = keys.pickle.List({keys.pickle.Dict(items)});
  EXPECT_FALSE(Read(std::move(keys).File(one)));
}

TEST(HyperGroupsTest, AFewMentionsAreRead) {
  Pickled made;
  const NodeId root = made.Groups(made.Group(made.pickle.Int(1), made.Numbers(kMany)), 4);
  const auto read = Read(std::move(made).File(root));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->size(), 4u);
}

TEST(TorchOptimizerTest, OneStateMentionedOftenIsRefused) {
  Pickled made;
  PickleBuilder& pickle = made.pickle;
  std::vector<std::pair<NodeId, NodeId>> entries, states;
  const NodeId none = pickle.None();
  for (int64_t i = 0; i < kMany; ++i)
    entries.emplace_back(pickle.String("k" + std::to_string(i)), none);
  const NodeId state = pickle.Dict(entries);
  for (int64_t i = 0; i < kMany; ++i) states.emplace_back(pickle.Int(i), state);
  const NodeId group = made.Group(pickle.Int(1), made.Numbers(kMany));
  const NodeId root = pickle.Dict({{pickle.String("state"), pickle.Dict(states)},
                                   {pickle.String("param_groups"), pickle.List({group})}});
  const TorchFile file = std::move(made).File(root);
  const auto read = ReadTorchOptimizer(file.root(), file, BlobIndex{});
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, HasSubstr("mentioned often"));
}

TEST(TorchOptimizerTest, OneNameMentionedOftenIsRefused) {
  Pickled made;
  PickleBuilder& pickle = made.pickle;
  const NodeId name = pickle.String(std::string(1 << 20, 'n'));
  const NodeId group = pickle.Dict(
      {{pickle.String("params"), pickle.List(std::vector<NodeId>(size_t{kMany}, name))}});
  const NodeId root = pickle.Dict({{pickle.String("param_groups"), pickle.List({group})}});
  const TorchFile file = std::move(made).File(root);
  EXPECT_FALSE(ReadTorchOptimizer(file.root(), file, BlobIndex{}));
}

}  // namespace
}  // namespace ckptfs::deepspeed
