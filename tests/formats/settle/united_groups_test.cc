// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/united_groups.h"

#include <gtest/gtest.h>

#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

// A group's dict as a rank's file has it; parameters are called by its stage.
std::string HyperParameters(double decay, const std::string& called, int64_t only = -1) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items = {
      {builder.String("lr"), builder.Float(0.1)},
      {builder.String("weight_decay"), builder.Float(decay)},
      {builder.String("fused"), builder.None()},
      {builder.String("betas"), builder.Tuple({builder.Float(0.9)})},
      {builder.String("param_names"), builder.List({builder.String(called)})}};
  if (only >= 0) items.emplace_back(builder.String("only"), builder.Int(only));
  const NodeId root = builder.Dict(items);
  return PrintPickle(std::move(builder).Finish(root)).value();
}

class UnitedGroupsTest : public testing::Test {
 protected:
  UnitedGroupsTest() {
    for (const char* name : {"a", "b", "c", "d", "e"}) {
      Parameter parameter;
      parameter.name = name;
      (void)assembler_.AddParameter(std::move(parameter)).value();
    }
  }

  Status Add(size_t number, const std::string& hyper, std::vector<uint32_t> parameters) {
    std::vector<ParameterIndex> indexes;
    for (const uint32_t i : parameters) indexes.push_back(ParameterIndex{i});
    return united_.Add(number, hyper, indexes);
  }

  // Names by group.
  std::vector<std::string> Finish() {
    std::move(united_).Finish("");
    std::vector<std::string> out;
    for (const Group& group : assembler_.header().groups) {
      std::string names;
      for (const ParameterIndex p : group.parameters) names += assembler_.parameter(p).name;
      out.push_back(names);
    }
    return out;
  }

  std::vector<int64_t> Numbers() {
    std::vector<int64_t> out;
    for (const Group& group : assembler_.header().groups) {
      if (group.number) out.push_back(*group.number);
    }
    return out;
  }

  Assembler assembler_;
  UnitedGroups united_{assembler_};
};

using Names = std::vector<std::string>;

TEST_F(UnitedGroupsTest, StagesWithOneOptimizerAreOneGroup) {
  ASSERT_TRUE(Add(0, HyperParameters(0.1, "a"), {0, 1}));
  ASSERT_TRUE(Add(1, HyperParameters(0, "c"), {2}));
  ASSERT_TRUE(Add(0, HyperParameters(0.1, "d"), {3, 1}));  // names are the stage's
  ASSERT_TRUE(Add(1, "", {4}));
  EXPECT_EQ(Finish(), (Names{"abd", "ce"}));
  EXPECT_EQ(Numbers(), std::vector<int64_t>());
  EXPECT_TRUE(assembler_.header().notes.empty());
}

TEST_F(UnitedGroupsTest, StagesWithOthersAreKeptApart) {
  ASSERT_TRUE(Add(0, HyperParameters(0.1, "a"), {0}));
  ASSERT_TRUE(Add(1, HyperParameters(0, "b"), {1}));
  ASSERT_TRUE(Add(0, HyperParameters(0, "c"), {2}));       // a stage of norms
  ASSERT_TRUE(Add(0, HyperParameters(0.1, "d", 7), {3}));  // a key that others lack
  ASSERT_TRUE(Add(0, HyperParameters(0, "e"), {4}));
  EXPECT_EQ(Finish(), (Names{"a", "b", "ce", "d"}));
  EXPECT_EQ(Numbers(), (std::vector<int64_t>{0, 1, 0, 0}));
  ASSERT_EQ(assembler_.header().notes.size(), 1u);
}

TEST_F(UnitedGroupsTest, AParameterUnderTwoHyperParametersIsRefused) {
  ASSERT_TRUE(Add(0, HyperParameters(0.1, "a"), {0, 1}));
  const Status added = Add(0, HyperParameters(0, "a"), {2, 1});
  ASSERT_FALSE(added);
  EXPECT_EQ(added.error().code, ErrorCode::kInvalid);
  EXPECT_NE(added.error().message.find("'b'"), std::string::npos);
  EXPECT_NE(added.error().message.find("'weight_decay'"), std::string::npos);
}

}  // namespace
}  // namespace ckptfs
