// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <variant>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "formats/dcp/source.h"
#include "formats/families/shipped.h"
#include "formats/megatron/fsdp/form.h"
#include "formats/megatron/fsdp/keys.h"
#include "tests/formats/dcp/dcp_maker.h"
#include "tests/formats/megatron/first_left_out.h"
#include "tests/support/stored_elements.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::megatron {
namespace {

using dcp::DcpMaker;
using testing::HasSubstr;
using Of = FsdpKey::Of;
using Flags = std::map<std::string, std::variant<int64_t, bool, std::string>>;

constexpr const char* kOneFile = "__0_0.distcp";
constexpr const char* kOfModel = "model.module.";
constexpr const char* kOfState = "optimizer.state.module.module.module.";
constexpr const char* kOfGroup = "optimizer.param_to_group_meta.module.module.module.";

// ---- keys ---------------------------------------------------------------------------

TEST(FsdpKeys, WrappersAreNotOfTheName) {
  const auto is = [](std::string_view key, Of of, std::string_view name, std::string_view rest) {
    const FsdpKey read = FsdpKeyOf(key);
    EXPECT_EQ(read.of, of) << key;
    EXPECT_EQ(read.name, name) << key;
    EXPECT_EQ(read.rest, rest) << key;
  };
  is("model.module.a.weight", Of::kModel, "a.weight", "");
  is("model.a.weight", Of::kModel, "a.weight", "");
  is("optimizer.state.module.module.module.a.weight_w.exp_avg", Of::kState, "a.weight_w",
     "exp_avg");
  is("optimizer.param_to_group_meta.module.module.a.weight.lr", Of::kGroup, "a.weight", "lr");
  is("optimizer.state.exp_avg", Of::kOptimizer, "optimizer.state.exp_avg", "");
  is("optimizer.scaler", Of::kOptimizer, "optimizer.scaler", "");
  is("rng_state.(0, 0).0.torch_rng_state", Of::kOther, "rng_state.(0, 0).0.torch_rng_state", "");
  is("model.module.", Of::kOther, "model.module.", "");
}

TEST(FsdpKeys, OnlyAGatedLayerHasHalves) {
  const auto half = [](std::string_view name, FsdpHalf is, std::string_view of) {
    EXPECT_EQ(HalvedNameOf(name).half, is) << name;
    EXPECT_EQ(HalvedNameOf(name).name, of) << name;
  };
  const std::string mlp = "decoder.layers.0.mlp.";
  for (const char* name : {"linear_fc1.weight", "linear_fc1.bias", "shared_experts.linear_fc1.bias",
                           "experts.linear_fc1.weight12", "experts.linear_fc1.bias0",
                           "experts.local_experts.3.linear_fc1.weight"}) {
    half(StrCat(mlp, name, "_w"), FsdpHalf::kGate, StrCat(mlp, name));
    half(StrCat(mlp, name, "_v"), FsdpHalf::kUp, StrCat(mlp, name));
    half(StrCat(mlp, name), FsdpHalf::kAll, StrCat(mlp, name));
  }
  for (const char* name : {"linear_fc2.weight_w", "experts.linear_fc1.weight_w",
                           "linear_fc1.weight_x", "experts.local_experts.linear_fc1.weight_w",
                           "experts.local_experts.3.linear_fc1.weight0_w", "router.weight_v"}) {
    half(StrCat(mlp, name), FsdpHalf::kAll, StrCat(mlp, name));
  }
  half("conv.weight_v", FsdpHalf::kAll, "conv.weight_v");
}

// ---- steps --------------------------------------------------------------------------

// Arguments of a model of two layers with two experts each, of which one has a dense layer's names.
Flags JobArguments() {
  return {{"num_layers", int64_t{1}},
          {"hidden_size", int64_t{4}},
          {"num_attention_heads", int64_t{2}},
          {"num_query_groups", int64_t{2}},
          {"kv_channels", int64_t{2}},
          {"num_experts", int64_t{2}},
          {"swiglu", true},
          {"bf16", true},
          {"tensor_model_parallel_size", int64_t{1}},
          {"pipeline_model_parallel_size", int64_t{1}},
          {"ckpt_format", std::string("fsdp_dtensor")}};
}

std::string ArgumentsArchive(const Flags& values) {
  PickleBuilder b;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : values) {
    const NodeId name = b.String(key);
    NodeId node{};
    if (const auto* whole = std::get_if<int64_t>(&value)) node = b.Int(*whole);
    if (const auto* flag = std::get_if<bool>(&value)) node = b.Bool(*flag);
    if (const auto* text = std::get_if<std::string>(&value)) node = b.String(*text);
    items.emplace_back(name, node);
  }
  const NodeId cls = b.Global("argparse", "Namespace");
  const NodeId none = b.Tuple({});
  const NodeId state = b.Dict(items);
  const NodeId root = b.Object(cls, none, state);
  return dcp::ObjectArchive(std::move(b).Finish(root));
}

std::vector<float> RampOf(float first, size_t count) {
  std::vector<float> out;
  for (size_t i = 0; i < count; ++i) out.push_back(first + static_cast<float>(i));
  return out;
}

std::vector<float> Joined(std::initializer_list<std::vector<float>> parts) {
  std::vector<float> out;
  for (const std::vector<float>& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

class FsdpReaderTest : public testing::Test {
 protected:
  FsdpReaderTest() : source_(MakeDcpSource({FsdpForm()})), families_(ShippedFamilies().value()) {
    options_.families = &families_;
    Parameter("embedding.word_embeddings.weight", {6, 4}, 1000);
    Parameter("output_layer.weight", {6, 4}, 2000);
    Parameter("decoder.final_layernorm.weight", {4}, 3000);
    Parameter("decoder.layers.0.self_attention.linear_qkv.weight", {12, 4}, 4000);
    Parameter("decoder.layers.0.self_attention.linear_proj.weight", {4, 4}, 5000);
    Parameter("decoder.layers.0.input_layernorm.weight", {4}, 6000);
    Parameter("decoder.layers.0.pre_mlp_layernorm.weight", {4}, 7000);
    Parameter("decoder.layers.0.mlp.router.weight", {2, 4}, 8000);
    for (int expert = 0; expert < 2; ++expert) {
      const float first = 10000.0F + 1000.0F * static_cast<float>(expert);
      Gated(Expert(expert, "linear_fc1"), {3, 4}, first);
      Parameter(Expert(expert, "linear_fc2"), {4, 3}, first + 500);
    }
  }

  static std::string Expert(int number, std::string_view what) {
    return StrCat("decoder.layers.0.mlp.experts.local_experts.", number, ".", what, ".weight");
  }

  static std::string Dotted(const std::vector<std::string>& path) {
    std::string out = path.front();
    for (size_t i = 1; i < path.size(); ++i) out += "." + path[i];
    return out;
  }

  // A tensor and its moment, each of the rows that two ranks have.
  void Tensors(const std::string& name, const Shape& shape, float first) {
    const std::vector<std::string> model = {"model", "module." + name};
    const std::vector<std::string> state = {"optimizer", "state", "module.module.module." + name,
                                            "exp_avg"};
    for (const auto& path : {model, state}) {
      DcpMaker::Cut one{Shape(shape.size(), 0), shape, kOneFile};
      DcpMaker::Cut two{Shape(shape.size(), 0), shape, "__1_0.distcp"};
      one.sizes[0] = 1;
      two.offsets[0] = 1;
      two.sizes[0] = shape[0] - 1;
      made_.AddTensor(Dotted(path), shape, first, {two, one}, path);
      first += 100;
    }
  }
  void Hyper(const std::string& name, int64_t decay = 1) {
    for (const auto& [key, value] : std::map<std::string, int64_t>{{"step", 5}, {"wd", decay}}) {
      made_.AddObject(StrCat(kOfGroup, name, ".", key), dcp::NumberArchive(value), kOneFile,
                      {"optimizer", "param_to_group_meta", "module.module.module." + name, key});
    }
  }
  void Parameter(const std::string& name, const Shape& shape, float first) {
    Tensors(name, shape, first);
    Hyper(name, shape.size() > 1 ? 1 : 0);
  }
  void Gated(const std::string& name, const Shape& half, float first) {
    Tensors(name + "_w", half, first);
    Tensors(name + "_v", half, first + 200);
    Hyper(name);
  }
  void Forget(std::string_view part) {
    std::erase_if(made_.entries, [&](const dcp::MadeEntry& one) {
      return one.key.find(part) != std::string::npos;
    });
  }

  Result<StepModel> Read() {
    DcpMaker made = made_;
    if (!args_.empty()) made.AddObject("args", ArgumentsArchive(args_), kOneFile, {"args"});
    made.AddObject("checkpoint_version", dcp::NumberArchive(3), kOneFile, {"checkpoint_version"});
    made.AddObject("iteration", dcp::NumberArchive(9), kOneFile, {"iteration"});
    made.AddObject("rng_state.(0, 0).0", dcp::NumberArchive(1), kOneFile,
                   {"rng_state", "(0, 0)", "#0"});
    for (const auto& [name, bytes] : made.files)
      directory_.Write("run/iter_0000009/" + name, bytes);
    directory_.Write("run/iter_0000009/.metadata", made.Metadata());
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(directory_.path() + "/run"));
    CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(place.root, place.directory));
    if (found.size() != 1) return Fail(ErrorCode::kNotFound, StrCat(found.size(), " steps"));
    latest_ = found[0].latest;
    CKPT_RETURN_IF_ERROR(source_->StateOf(found[0], options_, {}).Readable());
    return source_->Read(found[0], options_);
  }
  std::string Refused() {
    const auto read = Read();
    return read ? "taken" : read.error().message;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
  DcpMaker made_;
  Flags args_ = JobArguments();
  bool latest_ = false;
};

TEST_F(FsdpReaderTest, HalvesAndExpertsAreOneTensor) {
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "megatron_fsdp");
  EXPECT_EQ(step->iteration, 9u);
  EXPECT_EQ(step->family, "megatron_core");
  const std::string fc1 = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight";
  ASSERT_TRUE(step->FindParameter(fc1));
  EXPECT_EQ(step->parameter(*step->FindParameter(fc1)).shape, (Shape{2, 6, 4}));
  EXPECT_EQ(StoredElements(*step, fc1, "master"),
            Joined({RampOf(10000, 12), RampOf(10200, 12), RampOf(11000, 12), RampOf(11200, 12)}));
  EXPECT_EQ(StoredElements(*step, fc1, "exp_avg"),
            Joined({RampOf(10100, 12), RampOf(10300, 12), RampOf(11100, 12), RampOf(11300, 12)}));
  EXPECT_EQ(
      StoredElements(*step, "decoder.layers.0.mlp.experts.experts.linear_fc2.weight", "exp_avg"),
      Joined({RampOf(10600, 12), RampOf(11600, 12)}));
  EXPECT_TRUE(step->FindParameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight"));
  EXPECT_EQ(FirstLeftOut(*step, LeftOutPart::kOptimizer), nullptr);
}

TEST_F(FsdpReaderTest, WeightsAreTheMastersCastAndGroupsAreSaid) {
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  const auto qkv = step->FindParameter("decoder.layers.0.self_attention.linear_qkv.weight");
  ASSERT_TRUE(qkv);
  EXPECT_EQ(step->atom(*step->FindAtom(*qkv, "weight")).dtype, DType::kBF16);
  EXPECT_EQ(step->atom(*step->FindAtom(*qkv, "master")).dtype, DType::kF32);
  EXPECT_EQ(step->atom(*step->FindAtom(*qkv, "step")).source.inline_bytes[0], 5);
  ASSERT_EQ(step->groups.size(), 2u);
  size_t members = 0;
  for (const auto& group : step->groups) {
    members += group.parameters.size();
    for (const ParameterIndex p : group.parameters) {
      EXPECT_EQ(step->parameter(p).name.find("norm") != std::string::npos,
                group.parameters.size() == 3)
          << step->parameter(p).name;
    }
  }
  EXPECT_EQ(members, step->parameters.size());
}

TEST_F(FsdpReaderTest, AnFp32JobsWeightsAreItsMasters) {
  args_["bf16"] = false;
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  const auto qkv = step->FindParameter("decoder.layers.0.self_attention.linear_qkv.weight");
  EXPECT_EQ(step->atom(*step->FindAtom(*qkv, "weight")).dtype, DType::kF32);
  EXPECT_FALSE(step->FindAtom(*qkv, "master"));
}

TEST_F(FsdpReaderTest, WeightsAloneAreAsTheyAreSaved) {
  options_.weights_only = true;
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "output_layer.weight", "weight"), RampOf(2000, 24));
  EXPECT_FALSE(step->FindAtom(*step->FindParameter("output_layer.weight"), "exp_avg"));
}

TEST_F(FsdpReaderTest, TheTrackerTellsTheLatest) {
  directory_.Write("run/latest_checkpointed_iteration.txt", "9");
  ASSERT_TRUE(Read());
  EXPECT_TRUE(latest_);
  directory_.Write("run/latest_checkpointed_iteration.txt", "8");
  EXPECT_TRUE(Read());
  EXPECT_FALSE(latest_);
}

TEST_F(FsdpReaderTest, WithoutTheJobsWordItIsNotTheForm) {
  for (const char* word : {"torch_dcp", ""}) {
    args_["ckpt_format"] = std::string(word);
    const auto step = Read();
    ASSERT_TRUE(step) << step.error().message;
    EXPECT_EQ(step->framework, "dcp");
  }
}

// Megatron-Bridge does not save arguments.
TEST_F(FsdpReaderTest, WithoutArgumentsHyperParametersTellTheForm) {
  args_.clear();
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "megatron_fsdp");
  const std::string fc1 = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight";
  EXPECT_EQ(StoredElements(*step, fc1, "weight"),
            Joined({RampOf(10000, 12), RampOf(10200, 12), RampOf(11000, 12), RampOf(11200, 12)}));
  EXPECT_TRUE(step->FindAtom(*step->FindParameter(fc1), "exp_avg"));
  EXPECT_EQ(step->groups.size(), 2u);
}

TEST_F(FsdpReaderTest, WithoutArgumentsAHalfThatIsAParameterIsNotAHalf) {
  args_.clear();
  Forget(StrCat(kOfGroup, Expert(0, "linear_fc1")));
  for (const char* half : {"_w", "_v"}) Hyper(Expert(0, "linear_fc1") + half);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "dcp");
}

TEST_F(FsdpReaderTest, WithoutArgumentsAStrangerMakesItAnotherForm) {
  args_.clear();
  Hyper("decoder.layers.0.nobody.weight");
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "dcp");
}

TEST_F(FsdpReaderTest, WithoutArgumentsAllTensorsOfExpertsAreOfAsMany) {
  args_.clear();
  Forget(Expert(1, "linear_fc2"));
  EXPECT_THAT(Refused(), HasSubstr("is there of 1 experts, but others are of 2"));
}

// ---- what is refused, and what is left out alone ---------------------------------------

TEST_F(FsdpReaderTest, AHalfWithoutTheOtherIsRefused) {
  Forget(StrCat(kOfModel, Expert(1, "linear_fc1"), "_v"));
  EXPECT_THAT(Refused(), HasSubstr("local_experts.1.linear_fc1.weight_w' is there without '_v'"));
}

TEST_F(FsdpReaderTest, HalvesThatAreNotAlikeAreRefused) {
  Forget(StrCat(kOfModel, Expert(1, "linear_fc1"), "_v"));
  made_.AddTensor(StrCat(kOfModel, Expert(1, "linear_fc1"), "_v"), {2, 4}, 1,
                  {{{0, 0}, {2, 4}, kOneFile}});
  EXPECT_THAT(Refused(), HasSubstr("its halves are not alike"));
}

TEST_F(FsdpReaderTest, ATensorBesideItsHalvesIsRefused) {
  made_.AddTensor(StrCat(kOfModel, Expert(1, "linear_fc1")), {6, 4}, 1,
                  {{{0, 0}, {6, 4}, kOneFile}});
  EXPECT_THAT(Refused(), HasSubstr("in one tensor and in two halves"));
}

TEST_F(FsdpReaderTest, HalvesOfAJobThatDoesNotGateAreRefused) {
  args_["swiglu"] = false;
  EXPECT_THAT(Refused(), HasSubstr("the arguments say that it is not gated"));
}

TEST_F(FsdpReaderTest, GatesOfSeveralRanksInOneTensorAreRefused) {
  for (const char* half : {"_w", "_v"}) Forget(StrCat("local_experts.0.linear_fc1.weight", half));
  made_.AddTensor(StrCat(kOfModel, Expert(0, "linear_fc1")), {6, 4}, 1,
                  {{{0, 0}, {6, 4}, kOneFile}});
  args_["tensor_model_parallel_size"] = int64_t{2};
  EXPECT_THAT(Refused(), HasSubstr("rows of 2 tensor-parallel ranks are one behind the other"));
}

TEST_F(FsdpReaderTest, ProjectionsOfSeveralRanksInOneTensorAreRefused) {
  Parameter("decoder.layers.0.mixer.in_proj.weight", {8, 4}, 1);
  args_["tensor_model_parallel_size"] = int64_t{2};
  EXPECT_THAT(Refused(), HasSubstr("mixer.in_proj.weight' is in one tensor"));
}

TEST_F(FsdpReaderTest, MissingExpertsAndLayersAreRefused) {
  args_["num_experts"] = int64_t{4};
  EXPECT_THAT(Refused(), HasSubstr("2 experts, but the arguments say num_experts 4"));
  args_ = JobArguments();
  args_["num_layers"] = int64_t{2};
  EXPECT_THAT(Refused(), HasSubstr("'decoder.layers.' has 1 layers"));
  args_.erase("num_layers");
  EXPECT_THAT(Refused(), HasSubstr("do not say num_layers"));
  args_ = JobArguments();
  args_["pipeline_model_parallel_size"] = int64_t{2};
  EXPECT_THAT(Refused(), HasSubstr("2 pipeline stages"));
}

TEST_F(FsdpReaderTest, NamesOfTransformerEnginesModulesAreKept) {
  Forget("decoder.layers.0");
  const std::string of = "decoder.layers.0.";
  Parameter(of + "self_attention.linear_qkv.layer_norm_weight", {4}, 1);
  Parameter(of + "self_attention.linear_qkv.weight", {12, 4}, 20);
  Parameter(of + "self_attention.linear_proj.weight", {4, 4}, 300);
  Parameter(of + "mlp.linear_fc1.layer_norm_weight", {4}, 600);
  Gated(of + "mlp.linear_fc1.weight", {3, 4}, 1000);
  Parameter(of + "mlp.linear_fc2.weight", {4, 3}, 2000);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->parameters.size(), 9u);
  EXPECT_EQ(StoredElements(*step, of + "mlp.linear_fc1.layer_norm_weight", "master"),
            RampOf(600, 4));
  EXPECT_EQ(StoredElements(*step, of + "mlp.linear_fc1.weight", "master"),
            Joined({RampOf(1000, 12), RampOf(1200, 12)}));
}

TEST_F(FsdpReaderTest, ExpertsBesideTheDecoderAreOneTensorToo) {
  const std::string of = "mtp.layers.0.transformer_layer.mlp.experts.";
  Gated(of + "linear_fc1.weight0", {3, 4}, 20000);
  Gated(of + "linear_fc1.weight1", {3, 4}, 21000);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, of + "experts.linear_fc1.weight", "master"),
            Joined({RampOf(20000, 12), RampOf(20200, 12), RampOf(21000, 12), RampOf(21200, 12)}));
  Forget("linear_fc1.weight1");
  EXPECT_THAT(Refused(), HasSubstr("1 experts, but the arguments say num_experts 2"));
}

TEST_F(FsdpReaderTest, ExpertsOfAnotherShapeAreRefused) {
  Forget(Expert(1, "linear_fc2"));
  Parameter(Expert(1, "linear_fc2"), {4, 2}, 1);
  EXPECT_THAT(Refused(), HasSubstr("does not have the shape and type of expert 0's"));
}

TEST_F(FsdpReaderTest, GroupedExpertsOfARankAreRefused) {
  Parameter("decoder.layers.0.mlp.experts.weight1", {4, 12}, 1);
  EXPECT_THAT(Refused(), HasSubstr("(GroupedMLP)"));
}

TEST_F(FsdpReaderTest, AStateOfSomePartsIsLeftOutAlone) {
  Forget(StrCat(kOfState, Expert(1, "linear_fc1"), "_w.exp_avg"));
  made_.AddTensor(StrCat(kOfState, "nobody.weight.exp_avg"), {2}, 1, {{{0}, {2}, kOneFile}});
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  const auto fc1 = step->FindParameter("decoder.layers.0.mlp.experts.experts.linear_fc1.weight");
  EXPECT_FALSE(step->FindAtom(*fc1, "exp_avg"));
  EXPECT_TRUE(step->FindAtom(*fc1, "master"));
  EXPECT_TRUE(step->FindAtom(*step->FindParameter("output_layer.weight"), "exp_avg"));
  std::vector<std::string> texts;
  for (const LeftOut& one : step->left_out) texts.push_back(LeftOutText(one));
  EXPECT_THAT(texts, testing::Contains(HasSubstr("'decoder.layers.0.mlp.experts.local_experts.1."
                                                 "linear_fc1.weight_w' does not have it")));
  EXPECT_THAT(texts, testing::Contains(HasSubstr("a tensor that the model does not have")));
}

TEST_F(FsdpReaderTest, AStateOfAnotherShapeIsLeftOutAlone) {
  Forget(StrCat(kOfState, "output_layer.weight.exp_avg"));
  made_.AddTensor(StrCat(kOfState, "output_layer.weight.exp_avg"), {6}, 1, {{{0}, {6}, kOneFile}});
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_FALSE(step->FindAtom(*step->FindParameter("output_layer.weight"), "exp_avg"));
  EXPECT_THAT(FirstLeftOut(*step, LeftOutPart::kOptimizer)->why,
              HasSubstr("does not have its tensor's shape"));
}

TEST_F(FsdpReaderTest, ExpertsOfDifferentHyperParametersHaveNone) {
  Forget(StrCat(kOfGroup, Expert(1, "linear_fc2")));
  Hyper(Expert(1, "linear_fc2"), 7);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  const LeftOut* left = FirstLeftOut(*step, LeftOutPart::kOptimizer);
  ASSERT_NE(left, nullptr);
  EXPECT_THAT(left->what, HasSubstr("experts.experts.linear_fc2.weight"));
  EXPECT_THAT(left->why, HasSubstr("its parts have different ones"));
  EXPECT_TRUE(step->FindAtom(
      *step->FindParameter("decoder.layers.0.mlp.experts.experts.linear_fc2.weight"), "exp_avg"));
}

}  // namespace
}  // namespace ckptfs::megatron
