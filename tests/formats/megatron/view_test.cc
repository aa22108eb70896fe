// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/megatron/module_keys.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs::megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Layout LayoutOf(const char* text) { return Layout::ParseExactly(text).value(); }

Result<std::shared_ptr<const View>> Open(const TinyStep& step, const char* layout = "tp1") {
  const MegatronFormat format(Translations::Make(std::nullopt).value(), std::nullopt, 64);
  return format.Open(ShownState::Of(step.shared(), LayoutOf(layout)));
}

TinyStepOptions OfMegatron() {
  TinyStepOptions options;
  options.megatron = true;
  return options;
}

// The dict of a group with a hyper-parameter changed, or one more.
std::string With(const std::string& pickled, const char* name, double value) {
  const auto parsed = ParsePickle(pickled).value();
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, old] : RootOf(parsed.tree).Items()) {
    if (key.String() != name) items.emplace_back(builder.Copy(key), builder.Copy(old));
  }
  items.emplace_back(builder.String(name), builder.Float(value));
  const NodeId root = builder.Dict(items);
  return PrintPickle(std::move(builder).Finish(root)).value();
}

TEST(MegatronViewTest, AStepIsWhatLoadTakes) {
  const TinyStep step(OfMegatron());
  const auto view = Open(step, "tp2").value();
  EXPECT_THAT(view->LeftOut(), IsEmpty());
  std::vector<std::string> names;
  const auto listed = view->List("megatron/iter_0000005").value();
  for (const ViewEntry& entry : listed) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre(".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt",
                                 "metadata.json"));
  EXPECT_EQ(view->Find("megatron/latest_checkpointed_iteration.txt")->size, 1u);
}

TEST(MegatronViewTest, HyperParametersThatDifferInsideAGroupLeaveTheOptimizerOutByName) {
  TinyStepOptions options = OfMegatron();
  options.groups = 2;  // what has no second dimension has its own; Megatron: what has one
  TinyStep step(options);
  auto& groups = step.model().groups;
  std::erase_if(groups[1].parameters, [&](ParameterIndex p) {
    const bool scalar = step.model().parameter(p).shape.empty();
    if (scalar) groups[0].parameters.push_back(p);
    return scalar;
  });
  groups[1].hyper_parameters = With(groups[1].hyper_parameters, "lr", 0.5);
  EXPECT_THAT(Open(step).value()->LeftOut(), IsEmpty());  // a group each
  groups[0].parameters.push_back(groups[1].parameters.back());
  groups[1].parameters.pop_back();
  const auto left = Open(step).value()->LeftOut();
  ASSERT_EQ(left.size(), 1u);
  EXPECT_THAT(left[0], HasSubstr("the optimizer: 'decoder.layers.0.norm.weight'"));
  EXPECT_THAT(left[0], HasSubstr("'lr' is another one than that of"));
}

TEST(MegatronViewTest, WithoutMarksOfGroupsThereAreWeightsAlone) {
  TinyStepOptions options = OfMegatron();
  TinyStep step(options);
  step.model().groups.clear();
  const auto left = Open(step).value()->LeftOut();
  ASSERT_EQ(left.size(), 1u);
  EXPECT_THAT(left[0], HasSubstr("hyper-parameters of the optimizer's groups are not known"));
}

TEST(MegatronViewTest, AStateThatOneParameterLacksLeavesTheOptimizerOut) {
  TinyStepOptions options = OfMegatron();
  options.lazy_state = true;
  const TinyStep step(options);
  const auto left = Open(step).value()->LeftOut();
  ASSERT_EQ(left.size(), 1u);
  EXPECT_THAT(left[0], HasSubstr("exp_avg"));
}

// ckptfs.megatron: the job's own directory loads it.
TEST(MegatronViewTest, ASnapshotOfARunningJobIsRefused) {
  TinyStep step(OfMegatron());
  step.model().parameters[3].name = "decoder.layers.norm.weight";
  step.model().BuildIndex();
  const auto view = Open(step);
  ASSERT_FALSE(view);
  EXPECT_THAT(view.error().message, HasSubstr("'decoder.layers.norm.weight': it is of all layers"));
}

TEST(MegatronViewTest, NamesThatNothingProvesAreRefused) {
  const TinyStep step((TinyStepOptions()));
  const auto view = Open(step);
  ASSERT_FALSE(view);
  EXPECT_THAT(view.error().message, HasSubstr("nothing proves how its tensors are named"));
}

TEST(ModuleKeysTest, TheFactSaysWhatTheKeysSaid) {
  dcp::DcpMetadata metadata;
  for (const char* name : {"decoder.layers.a.weight", "embedding.weight"}) {
    metadata.tensors.push_back({});
    metadata.tensors.back().name = name;
  }
  for (const char* name :
       {"decoder.layers.a._extra_state/shard_0_2", "decoder.layers.a._extra_state/shard_1_2",
        "decoder.layers.b._extra_state/shard_1_2", "rng_state/shard_0_1",
        "decoder.layers.c._extra_state/shard_0_99999999999", "c._extra_state/shard_0_0",
        "d._extra_state", "optimizer.x._extra_state/shard_0_1"}) {
    metadata.objects.push_back({});
    metadata.objects.back().name = name;
  }
  const ModuleKeys keys = ModuleKeysOf(metadata);
  EXPECT_TRUE(keys.stacked);
  EXPECT_THAT(keys.objects, ElementsAre(testing::Pair("decoder.layers.a._extra_state", Shape{2})));
  metadata.tensors[0].name = "decoder.layers.0.a.weight";
  EXPECT_FALSE(ModuleKeysOf(metadata).stacked);
}

}  // namespace
}  // namespace ckptfs::megatron
