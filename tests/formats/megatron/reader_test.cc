// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/view/source_runs.h"
#include "formats/families/shipped.h"
#include "formats/megatron/args_config.h"
#include "formats/megatron/source.h"
#include "formats/tools/model_files.h"
#include "tests/formats/dcp/dcp_maker.h"
#include "tests/formats/megatron/first_left_out.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::megatron {
namespace {

using dcp::DcpMaker;
using testing::HasSubstr;

constexpr const char* kFile = "__0_0.distcp";
constexpr const char* kBackend =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";

// Arguments of a tiny Llama: two layers, two heads of two channels, one group of keys and values.
using Values = std::map<std::string, std::variant<int64_t, double, bool, std::string>>;
Values Arguments() {
  return {{"num_layers", int64_t{2}},
          {"hidden_size", int64_t{4}},
          {"ffn_hidden_size", int64_t{3}},
          {"num_attention_heads", int64_t{2}},
          {"group_query_attention", true},
          {"num_query_groups", int64_t{1}},
          {"kv_channels", int64_t{2}},
          {"max_position_embeddings", int64_t{64}},
          {"norm_epsilon", 1e-5},
          {"normalization", std::string("RMSNorm")},
          {"swiglu", true},
          {"add_bias_linear", false},
          {"position_embedding_type", std::string("rope")},
          {"rotary_percent", 1.0},
          {"rotary_base", int64_t{10000}},
          {"rotary_interleaved", false},
          {"apply_layernorm_1p", false},
          {"untie_embeddings_and_output_weights", true},
          {"tensor_model_parallel_size", int64_t{2}},
          {"vocab_size", int64_t{5}}};
}

NodeId NodeOf(PickleBuilder& b, const Values& values) {
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : values) {
    const NodeId name = b.String(key);
    NodeId node{};
    if (const auto* whole = std::get_if<int64_t>(&value)) node = b.Int(*whole);
    if (const auto* real = std::get_if<double>(&value)) node = b.Float(*real);
    if (const auto* flag = std::get_if<bool>(&value)) node = b.Bool(*flag);
    if (const auto* text = std::get_if<std::string>(&value)) node = b.String(*text);
    items.emplace_back(name, node);
  }
  return b.Dict(items);
}

NodeId NamespaceOf(PickleBuilder& b, const Values& values) {
  const NodeId cls = b.Global("argparse", "Namespace");
  const NodeId none = b.Tuple({});
  const NodeId state = NodeOf(b, values);
  return b.Object(cls, none, state);
}

struct Group {
  double wd_mult = 1.0;
  int64_t step = 3;
};

// common_state/shard_0_1 as cores from 0.19 on have it: a list of one dict.
std::string CommonOf(const Values& args, const std::vector<Group>& groups) {
  PickleBuilder b;
  std::vector<NodeId> list;
  for (const Group& group : groups) {
    list.push_back(NodeOf(b, {{"wd_mult", group.wd_mult},
                              {"lr", 0.5},
                              {"is_expert_parallel", false},
                              {"step", group.step}}));
  }
  const auto pair = [&](const char* key, NodeId value) { return std::pair(b.String(key), value); };
  const NodeId inner = b.Dict({pair("param_groups", b.List(std::move(list)))});
  const NodeId optimizer = b.Dict({pair("optimizer", inner)});
  const NodeId arguments = NamespaceOf(b, args);
  const NodeId root = b.List({b.Dict(
      {pair("optimizer", optimizer), pair("args", arguments), pair("iteration", b.Int(9))})});
  return dcp::ObjectArchive(std::move(b).Finish(root));
}

class MegatronReaderTest : public testing::Test {
 protected:
  MegatronReaderTest() : source_(MakeMegatronSource()), families_(ShippedFamilies().value()) {
    options_.families = &families_;
    Stack("decoder.layers.self_attention.linear_qkv.weight", {2, 8, 4});
    Stack("decoder.layers.self_attention.linear_qkv.layer_norm_weight", {2, 4});
    Stack("decoder.layers.self_attention.linear_proj.weight", {2, 4, 4});
    Stack("decoder.layers.mlp.linear_fc1.weight", {2, 6, 4});
    Stack("decoder.layers.mlp.linear_fc1.layer_norm_weight", {2, 4});
    Stack("decoder.layers.mlp.linear_fc2.weight", {2, 4, 3});
    for (const char* name : {"embedding.word_embeddings.weight", "output_layer.weight"}) {
      made_.AddTensor(name, {6, 4}, 7000, {{{0, 0}, {6, 4}, kFile}});
    }
    made_.AddTensor("decoder.final_layernorm.weight", {4}, 8000, {{{0}, {4}, kFile}});
  }

  // A tensor and its moment: a chunk a layer, or one of all.
  void Stack(const std::string& key, const Shape& shape, bool whole = false) {
    for (const std::string prefix : {"", "optimizer.state.exp_avg."}) {
      std::vector<DcpMaker::Cut> cuts;
      for (uint64_t layer = 0; layer < (whole ? 1 : shape[0]); ++layer) {
        DcpMaker::Cut cut{Shape(shape.size(), 0), shape, kFile};
        cut.offsets[0] = layer;
        if (!whole) cut.sizes[0] = 1;
        cuts.push_back(cut);
      }
      made_.AddTensor(prefix + key, shape, first_ += 1000, cuts);
    }
  }

  Result<StepModel> Read() {
    if (common_) made_.AddObject("common_state/shard_0_1", CommonOf(args_, groups_), kFile);
    for (const auto& [name, bytes] : made_.files)
      directory_.Write("run/iter_0000007/" + name, bytes);
    directory_.Write("run/iter_0000007/.metadata", made_.Metadata());
    directory_.Write("run/iter_0000007/metadata.json", backend_);
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(directory_.path() + "/run"));
    CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(place.root, place.directory));
    if (found.size() != 1) return Fail(ErrorCode::kNotFound, StrCat(found.size(), " steps"));
    CKPT_RETURN_IF_ERROR(source_->StateOf(found[0], options_, {}).Readable());
    return source_->Read(found[0], options_);
  }
  std::string Refusal() {
    const auto read = Read();
    return read ? "taken" : read.error().message;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
  DcpMaker made_;
  float first_ = 0;
  Values args_ = Arguments();
  std::vector<Group> groups_ = {{1.0, 3}, {0.0, 3}};
  bool common_ = true;
  std::string backend_ = kBackend;
};

TEST_F(MegatronReaderTest, StacksAreLayersWithStatesGroupsAndSizes) {
  Stack("decoder.layers.self_attention.q_layernorm.weight", {2, 2}, true);
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_EQ(step->framework, "megatron");
  EXPECT_EQ(step->iteration, 9u);
  EXPECT_EQ(step->parameters.size(), 2 * 7 + 3u);
  EXPECT_EQ(step->family, "megatron_core");
  EXPECT_EQ(step->family_sizes.at("heads"), 2);
  EXPECT_EQ(step->family_sizes.at("kv_heads"), 1);
  EXPECT_EQ(step->layout.tp, 2u);
  const auto fc1 = step->FindParameter("decoder.layers.1.mlp.linear_fc1.weight");
  ASSERT_TRUE(fc1.has_value());
  EXPECT_EQ(step->parameter(*fc1).shape, (Shape{6, 4}));
  EXPECT_EQ(step->parameter(*fc1).layer, 1u);
  EXPECT_EQ(step->parameter(*fc1).pattern, Pattern::Shard(0, {3, 3}));
  EXPECT_TRUE(step->FindAtom(*fc1, "exp_avg").has_value());
  const auto count = step->FindAtom(*fc1, "step");
  ASSERT_TRUE(count.has_value());
  EXPECT_EQ(step->atom(*count).source.inline_bytes[0], 3);
  // Both layers of a chunk that has all: the second lies behind the first.
  const auto norm = [&](int layer) {
    const auto p =
        step->FindParameter(StrCat("decoder.layers.", layer, ".self_attention.q_layernorm.weight"));
    const Gather& gather = step->atom(*step->FindAtom(*p, "weight")).source.gathers.front();
    return gather.series.front().offset;
  };
  EXPECT_EQ(norm(1), norm(0) + 2 * sizeof(float));
  ASSERT_EQ(step->groups.size(), 2u);
  for (const auto& group : step->groups) {
    for (const ParameterIndex p : group.parameters) {
      EXPECT_EQ(step->parameter(p).shape.size() == 1, &group == &step->groups[1]);
    }
  }
}

TEST_F(MegatronReaderTest, NormsOfQueriesDecayWhereTheArgumentsSaySo) {
  Stack("decoder.layers.self_attention.q_layernorm.weight", {2, 2}, true);
  args_["apply_wd_to_qk_layernorm"] = true;
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  ASSERT_EQ(step->groups.size(), 2u);
  const auto norm = step->FindParameter("decoder.layers.1.self_attention.q_layernorm.weight");
  EXPECT_THAT(step->groups[0].parameters, testing::Contains(*norm));
  EXPECT_THAT(step->notes, testing::Contains(HasSubstr("Megatron's own rule")));
}

TEST_F(MegatronReaderTest, MetadataOfCoresUpTo15IsOfAClassOfTheirOwn) {
  made_.module = "megatron.core.dist_checkpointing.strategies.torch";
  made_.name = "MCoreMetadata";
  EXPECT_EQ(Refusal(), "taken");
  made_.name = "MCoreSavePlan";
  EXPECT_THAT(Refusal(), HasSubstr("its pickle is not a Metadata"));
}

TEST_F(MegatronReaderTest, AConfigIsMadeOfTheArguments) {
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  const std::string* config = step->facts.model_files.config();
  ASSERT_NE(config, nullptr);
  EXPECT_TRUE(step->facts.config_made);
  for (const char* said : {R"("model_type": "llama")", R"("vocab_size": 6)", R"("head_dim": 2)",
                           R"("eos_token_id": null)", R"("num_key_value_heads": 1)"}) {
    EXPECT_THAT(*config, HasSubstr(said));
  }
}

TEST_F(MegatronReaderTest, WhatTheArgumentsDoNotSayMakesNoConfig) {
  const auto why = [&](const Values& args) {
    PickleBuilder b;
    const NodeId root = NamespaceOf(b, args);
    const PickleTree tree = std::move(b).Finish(root);
    const std::vector<StateDict::Tensor> tensors = {
        {"embedding.word_embeddings.weight", DType::kBF16, {6, 4}, {}},
        {"output_layer.weight", DType::kBF16, {6, 4}, {}}};
    const MadeConfig made = ConfigOfArguments(RootOf(tree), tensors);
    EXPECT_EQ(made.json.empty(), !made.why.empty());
    return made.why;
  };
  EXPECT_EQ(why(Arguments()), "");
  for (const auto& [name, value] : Arguments()) {
    if (name == "tensor_model_parallel_size" || name == "vocab_size") continue;
    Values fewer = Arguments();
    fewer.erase(name);
    EXPECT_THAT(why(fewer), HasSubstr(name));
  }
  const auto with = [&](const char* name, auto value) {
    Values other = Arguments();
    other[name] = value;
    return why(other);
  };
  EXPECT_THAT(with("rotary_percent", 0.5), HasSubstr("rotary_percent is 0.5, not 1.0"));
  EXPECT_THAT(with("use_rope_scaling", true), HasSubstr("use_rope_scaling"));
  EXPECT_THAT(with("window_size", int64_t{8}), HasSubstr("window_size"));
  EXPECT_THAT(with("hidden_size", int64_t{8}), HasSubstr("hidden_size"));
  EXPECT_THAT(with("untie_embeddings_and_output_weights", false), HasSubstr("untie"));
  EXPECT_EQ(ConfigOfArguments({}, {}).why, "the checkpoint does not hold them");
}

TEST_F(MegatronReaderTest, StacksOfDifferentNumbersOfLayersAreRefused) {
  Stack("decoder.layers.other", {3, 4});
  EXPECT_THAT(Refusal(), HasSubstr("2 layers"));
}

TEST_F(MegatronReaderTest, AStackOfOtherLayersThanTheArgumentsSayIsRefused) {
  args_["num_layers"] = int64_t{4};
  EXPECT_THAT(Refusal(), HasSubstr("num_layers 4"));
}

TEST_F(MegatronReaderTest, AStackThatClaimsAnyNumberOfLayersIsRefused) {
  made_.entries.clear();
  made_.AddTensor("decoder.layers.a", {uint64_t{1} << 40, 0}, 0, {});
  args_.erase("num_layers");
  EXPECT_THAT(Refusal(), HasSubstr("more than 1048576 tensors"));
}

TEST_F(MegatronReaderTest, AStackOfNoDimensionIsRefused) {
  made_.AddTensor("decoder.layers.a", {}, 1, {{{}, {}, kFile}});
  EXPECT_THAT(Refusal(), HasSubstr("does not have a dimension that counts the layers"));
}

TEST_F(MegatronReaderTest, WithoutTheCommonStateThereIsNoStep) {
  common_ = false;
  EXPECT_THAT(Refusal(), HasSubstr("neither common.pt nor the object"));
}

TEST_F(MegatronReaderTest, AnotherBackendOrVersionIsNotTaken) {
  backend_ = R"({"sharded_backend": "zarr", "sharded_backend_version": 1})";
  EXPECT_EQ(Refusal(), "0 steps");
  backend_ = R"({"sharded_backend": "torch_dist", "sharded_backend_version": 2})";
  EXPECT_THAT(Refusal(), HasSubstr("version 2, of which only 1 is known"));
}

TEST_F(MegatronReaderTest, GroupsWithoutOneWayAreLeftOutAlone) {
  groups_ = {{1.0, 3}, {1.0, 4}, {0.0, 3}};
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_TRUE(step->groups.empty());
  const LeftOut* left = FindLostState(*step, "");
  ASSERT_NE(left, nullptr);
  EXPECT_THAT(left->why, HasSubstr("leaves several ways"));
  const auto p = *step->FindParameter("decoder.layers.0.mlp.linear_fc2.weight");
  EXPECT_TRUE(step->FindAtom(p, "exp_avg").has_value());
  EXPECT_FALSE(step->FindAtom(p, "step").has_value());
}

// Cores up to 0.14 have two boxes of two rows each, of which ranks have four elements and two.
TEST_F(MegatronReaderTest, FlattenedStatesAreTheirTensors) {
  std::vector<DcpMaker::Cut> cuts;
  for (uint64_t cell = 0; cell < 4; ++cell) {
    cuts.push_back({{cell / 2, cell % 2, 0, 4}, {1, 1, 1, 2}, kFile});
    cuts.push_back({{cell / 2, cell % 2, 0, 0}, {1, 1, 1, 4}, kFile});
  }
  made_.AddTensor("optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2.weight", {2, 2, 1, 6},
                  1, cuts);
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_EQ(FirstLeftOut(*step, LeftOutPart::kOptimizer), nullptr);
  const auto p = *step->FindParameter("decoder.layers.1.mlp.linear_fc2.weight");
  const auto master = step->FindAtom(p, "master");
  ASSERT_TRUE(master.has_value());
  const Gather& gather = step->atom(*master).source.gathers.front();
  ASSERT_EQ(gather.locals.size(), 2u);
  EXPECT_EQ(gather.locals[0].pieces[0].atom_begin, (Shape{0, 0}));
  EXPECT_EQ(gather.locals[1].pieces[0].atom_begin, (Shape{2, 0}));
  EXPECT_EQ(gather.locals[1].pieces[0].shape, (Shape{2, 3}));
  EXPECT_EQ(gather.series[0].flat_begin, 0u);
}

TEST_F(MegatronReaderTest, FlattenedStatesThatLackARangeAreRefused) {
  made_.AddTensor("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight", {2, 2}, 1,
                  {{{0, 0}, {1, 2}, kFile}, {{1, 0}, {1, 1}, kFile}});
  EXPECT_NE(Refusal(), "taken");
}

TEST_F(MegatronReaderTest, ChunksOfSeveralBoxesAreLeftOut) {
  made_.AddTensor("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight", {2, 2}, 1,
                  {{{0, 0}, {2, 2}, kFile}});
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_THAT(FirstLeftOut(*step, LeftOutPart::kOptimizer)->why, HasSubstr("not a range of one"));
}

TEST_F(MegatronReaderTest, StatesThatAreNotOfTheirTensorsShapeAreLeftOutAlone) {
  made_.AddTensor("optimizer.state.exp_avg.decoder.final_layernorm.weight", {2, 4}, 1,
                  {{{0, 0}, {2, 4}, kFile}});
  made_.AddTensor("optimizer.state.exp_avg.unknown", {4}, 1, {{{0}, {4}, kFile}});
  made_.AddTensor(
      "chained_1.optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight", {2, 4},
      1, {{{0, 0}, {2, 4}, kFile}});
  made_.AddTensor("optimizer.state.weight.decoder.layers.mlp.linear_fc1.layer_norm_weight", {2, 4},
                  1, {{{0, 0}, {2, 4}, kFile}});
  made_.AddTensor("optimizer.distributed.dp_group_idx_0.param", {4}, 1, {{{0}, {4}, kFile}});
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  const auto p = *step->FindParameter("decoder.final_layernorm.weight");
  EXPECT_TRUE(step->FindAtom(p, "weight").has_value());
  EXPECT_FALSE(step->FindAtom(p, "exp_avg").has_value());
  std::string all;
  for (const LeftOut& one : step->left_out) all += LeftOutText(one);
  EXPECT_THAT(all, HasSubstr("nor what ranks made of that"));
  EXPECT_THAT(all, HasSubstr("a tensor that the model does not have"));
  EXPECT_THAT(all, HasSubstr("another optimizer of the chain has the same state"));
  EXPECT_THAT(all, HasSubstr("a name that ckptfs uses for something else"));
  EXPECT_EQ(step->parameter(p).role, Role::kTrainable);  // nobody says that it is frozen
  EXPECT_THAT(all, HasSubstr("--dist-ckpt-optim-fully-reshardable"));
}

}  // namespace
}  // namespace ckptfs::megatron
