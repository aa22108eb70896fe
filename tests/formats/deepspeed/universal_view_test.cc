// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_view.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <regex>
#include <set>

#include "core/base/strings.h"
#include "core/view/plan_reader.h"
#include "formats/deepspeed/universal/universal_info.h"
#include "formats/settle/united_groups.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"
#include "tests/conformance/tiny_step.h"
#include "tests/support/open_torch_file.h"

namespace ckptfs::deepspeed {
namespace {

class UniversalViewTest : public testing::Test {
 protected:
  void Make(const TinyStepOptions& options, const std::string& layout) {
    step_ = std::make_unique<TinyStep>(options);
    layout_ = Layout::Parse(layout).value();
    view_ = nullptr;
  }

  const View& view() {
    if (!view_) view_ = UniversalFormat().Open(ShownState::Of(step_->shared(), layout_)).value();
    return *view_;
  }

  Result<std::shared_ptr<const View>> OpenOf(const StepModel& model, const Layout& layout) {
    return UniversalFormat().Open(ShownState::Of(std::make_shared<const StepModel>(model), layout));
  }

  std::string Render(const std::string& path) {
    auto plan = view().MakePlan(path);
    EXPECT_TRUE(plan.has_value()) << path << ": " << (plan ? "" : plan.error().message);
    if (!plan) return "";
    std::string out(plan->size(), '?');
    const PlanReader reader(*plan, step_->model(), step_->blobs());
    auto got = reader.Read(0, std::as_writable_bytes(std::span(out.data(), out.size())));
    EXPECT_TRUE(got.has_value()) << (got ? "" : got.error().message);
    return out;
  }

  TorchFile Open(const std::string& path) {
    bytes_ = Render("deepspeed/global_step5/" + path);
    const std::string file = step_->directory() + "/rendered.pt";
    std::ofstream(file, std::ios::binary) << bytes_;
    auto opened = OpenTorchFile(file);
    EXPECT_TRUE(opened.has_value()) << path << ": " << (opened ? "" : opened.error().message);
    return *std::move(opened);
  }

  // The fp32 elements of a tensor of the file opened last.
  std::vector<float> Values(const TorchFile& file, PickleRef ref) {
    const TensorNode* tensor = ref.Tensor();
    if (tensor == nullptr || tensor->dtype != DType::kF32) return {};
    std::vector<float> values(ElementCount(tensor->shape).value());
    std::memcpy(values.data(),
                bytes_.data() + file.Locate(*tensor, BlobIndex{}).value().Bytes().value().offset,
                values.size() * 4);
    return values;
  }

  AtomIndex AtomOf(const std::string& name, std::string_view kind) {
    return step_->model().FindAtom(*step_->model().FindParameter(name), kind).value();
  }

  std::set<std::string> Names(const std::string& directory) {
    std::set<std::string> names;
    auto entries = view().List(directory);
    EXPECT_TRUE(entries.has_value()) << directory;
    if (entries) {
      for (const ViewEntry& entry : *entries) names.insert(entry.name);
    }
    return names;
  }

  std::unique_ptr<TinyStep> step_;
  Layout layout_;
  std::shared_ptr<const View> view_;
  std::string bytes_;
};

TEST_F(UniversalViewTest, NamesOfTheDirectory) {
  Make({}, "tp2_pp2");
  EXPECT_EQ(Names("deepspeed"),
            (std::set<std::string>{"latest", "latest_universal", "global_step5"}));
  EXPECT_EQ(Render("deepspeed/latest"), "global_step5");
  EXPECT_EQ(Render("deepspeed/latest_universal"), "global_step5");
  const auto tag = Names("deepspeed/global_step5");
  EXPECT_EQ(tag.size(), 9u);  // four model files under two names each, and zero/
  EXPECT_TRUE(tag.contains("mp_rank_03_model_states.pt"));
  EXPECT_TRUE(tag.contains("zero_pp_rank_0_mp_rank_03_model_states.pt"));
  EXPECT_EQ(Names("deepspeed/global_step5/zero/layers.0.qkv.weight"),
            (std::set<std::string>{"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}));
  const auto zero = Names("deepspeed/global_step5/zero");
  EXPECT_FALSE(zero.contains("layers.0.out.bias"));  // frozen
  EXPECT_FALSE(zero.contains("layers.0.freq"));      // buffer
  auto alias = view().Find("deepspeed/global_step5/zero/head.weight");
  ASSERT_TRUE(alias.has_value());
  EXPECT_EQ(alias->target, "embed.weight");
}

TEST_F(UniversalViewTest, ModelFileHasWhatEveryEngineReads) {
  Make({}, "tp2_pp2_dp3");
  const TorchFile file = Open("mp_rank_01_model_states.pt");
  const PickleRef root = file.root();
  EXPECT_EQ(root["mp_world_size"].Int(), 4);
  EXPECT_EQ(root["dp_world_size"].Int(), 3);
  EXPECT_EQ(root["global_steps"].Int(), 5);
  EXPECT_EQ(root["skipped_steps"].Int(), 0);
  EXPECT_EQ(root["iteration"].Int(), 5);
  EXPECT_TRUE(root["lr_scheduler"]);
  EXPECT_EQ(root["module"].size(), 2u);  // the buffers
  const PickleRef info = root["universal_checkpoint_info"];
  EXPECT_EQ(info["original_vocab_size"].Int(), 13);
  EXPECT_EQ(info["padded_vocab_size"].Int(), 16);
  EXPECT_EQ(info["parameter_with_row_parallelism_patterns"].at(0).String(),
            "^layers\\.\\d+\\.out\\.weight$");
  EXPECT_EQ(info["parameter_with_2_sub_params_cat_dim_0"].size(), 1u);
  EXPECT_EQ(info["parameter_with_sub_params"].at(0)["shape"].at(0).size(), 3u);
}

TEST_F(UniversalViewTest, ParameterFilesSayHowToCutThem) {
  Make({}, "tp2");
  TorchFile file = Open("zero/embed.weight/fp32.pt");
  EXPECT_EQ(file.root()["vocab_tensor"].Bool(), true);
  file = Open("zero/layers.1.out.weight/exp_avg.pt");
  EXPECT_EQ(file.root()["cat_dim"].Int(), 1);
  file = Open("zero/layers.1.gate_up.weight/fp32.pt");
  EXPECT_EQ(file.root()["param_n_sub_params"].Int(), 2);
  file = Open("zero/layers.1.norm.weight/fp32.pt");
  EXPECT_EQ(file.root().size(), 1u);
  file = Open("zero/layers.1.qkv.weight/fp32.pt");
  const PickleRef sub = file.root()["sub_param_shape"];
  EXPECT_EQ(sub.ClassName(), "deepspeed.checkpoint.universal_checkpoint.SubparamShape");
  EXPECT_EQ(sub["partition_dim"].Int(), 0);
  EXPECT_EQ(sub["shape"].at(0).at(0).Int(), 8);
  EXPECT_EQ(sub["shape"].at(1).Int(), 8);
}

TEST_F(UniversalViewTest, TensorsAreWholeAndFp32) {
  Make({}, "tp2");
  const TorchFile file = Open("zero/layers.0.qkv.weight/exp_avg_sq.pt");
  const auto values = Values(file, file.root()["param"]);
  const AtomIndex atom = AtomOf("layers.0.qkv.weight", "exp_avg_sq");
  ASSERT_EQ(values.size(), 128u);
  for (uint64_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], TinyStep::Value(atom, i));
}

TEST_F(UniversalViewTest, StepKeepsItsPythonType) {
  Make({}, "tp1");
  TorchFile file = Open("zero/embed.weight/step.pt");
  EXPECT_EQ(Values(file, file.root()), std::vector<float>{5});
  TinyStepOptions options;
  options.python_step = true;
  Make(options, "tp1");
  EXPECT_EQ(Open("zero/embed.weight/step.pt").root().Int(), 5);
}

TEST_F(UniversalViewTest, GroupsKeepTheirValuesAndStageThreeGetsTheShared) {
  TinyStepOptions options;
  options.groups = 2;
  Make(options, "tp1");
  const TorchFile file = Open("zero/optimizer_state.pt");
  const PickleRef groups = file.root()["param_groups"];
  EXPECT_EQ(groups.at(0)["weight_decay"].Number(), 0.1);
  EXPECT_EQ(groups.at(1)["weight_decay"].Number(), 0.0);
  EXPECT_EQ(groups.at(2).size(), 0u);  // for engines with more groups
  EXPECT_GE(groups.size(), 16u);
  const PickleRef three = file.root()["optimizer_state_dict"];
  EXPECT_EQ(three["param_groups"].size(), 1u);
  EXPECT_EQ(three["param_groups"].at(0)["lr"].Number(), 0.01);
  EXPECT_FALSE(three["param_groups"].at(0)["weight_decay"]);
  EXPECT_TRUE(three["state"].AtInt(0)["step"]);
  EXPECT_TRUE(file.root()["ds_version"].String().has_value());
}

// An engine counts the steps of a group once, ZeRO-3 those of all.
TEST_F(UniversalViewTest, StepsThatDifferAreRefusedWhereTheyAreCountedOnce) {
  TinyStepOptions options;
  options.groups = 2;
  Make(options, "tp1");
  StepModel step = step_->model();
  const auto set = [&](ParameterIndex parameter, float steps) {
    Atom& atom = step.atoms[static_cast<uint32_t>(step.FindAtom(parameter, "step").value())];
    atom.source.inline_bytes.assign(reinterpret_cast<const char*>(&steps), sizeof(steps));
  };
  ASSERT_GT(step.groups[1].parameters.size(), 0u);
  for (const ParameterIndex parameter : step.groups[1].parameters) set(parameter, 4);
  EXPECT_TRUE(OpenOf(step, layout_));
  const auto third = OpenOf(step, Layout::Parse("dp2_zero3").value());
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(third.error().message.find("5 steps of parameter"), std::string::npos);
  const ParameterIndex first = step.groups[0].parameters[0];
  set(first, 3);
  const auto one = OpenOf(step, layout_);
  ASSERT_FALSE(one);
  EXPECT_NE(one.error().message.find("group 0"), std::string::npos) << one.error().message;
  EXPECT_NE(one.error().message.find(step.parameter(first).name), std::string::npos);
}

TEST_F(UniversalViewTest, AStageThreeEngineFindsNoStepWhereTheyDiffer) {
  TinyStepOptions options;
  options.groups = 2;
  Make(options, "tp1");
  StepModel step = step_->model();
  const float four = 4;
  for (const ParameterIndex parameter : step.groups[1].parameters) {
    Atom& atom = step.atoms[static_cast<uint32_t>(step.FindAtom(parameter, "step").value())];
    atom.source.inline_bytes.assign(reinterpret_cast<const char*>(&four), sizeof(four));
  }
  view_ = OpenOf(step, layout_).value();
  const TorchFile file = Open("zero/optimizer_state.pt");
  EXPECT_EQ(file.root()["optimizer_state_dict"]["state"].size(), 0u);
}

// A flattened state dict has no groups: every group gets what holds of all parameters.
TEST_F(UniversalViewTest, GroupsOfAFlattenedSourceHaveWhatIsShared) {
  TinyStepOptions options;
  options.groups = 2;
  Make(options, "tp1");
  StepModel step = step_->model();
  step.facts.keys = KeyShape{.flat = true};
  view_ = OpenOf(step, layout_).value();
  const TorchFile file = Open("zero/optimizer_state.pt");
  const PickleRef groups = file.root()["param_groups"];
  EXPECT_GE(groups.size(), 16u);
  for (size_t g = 0; g < groups.size(); ++g) {
    EXPECT_EQ(groups.at(g)["lr"].Number(), 0.01);
    EXPECT_FALSE(groups.at(g)["weight_decay"]);
  }
}

TEST_F(UniversalViewTest, GroupsThatWereKeptApartAreRefused) {
  TinyStepOptions options;
  options.groups = 2;
  Make(options, "tp1");
  StepModel step = step_->model();
  for (Group& group : step.groups) group.number = 0;
  const auto view = OpenOf(step, layout_);
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kUnsupported);
  for (const Group& group : step.groups) {
    const std::string& name = step.parameter(group.parameters[0]).name;
    EXPECT_NE(view.error().message.find(name), std::string::npos) << view.error().message;
  }
}

TEST_F(UniversalViewTest, ParameterWithoutStateGetsZerosAndTheStepOfTheOthers) {
  TinyStepOptions options;
  options.lazy_state = true;
  Make(options, "tp1");
  EXPECT_EQ(Names("deepspeed/global_step5/zero/layers.0.norm.weight").size(), 4u);
  TorchFile file = Open("zero/layers.0.norm.weight/exp_avg.pt");
  EXPECT_EQ(Values(file, file.root()["param"]), std::vector<float>(8, 0));
  file = Open("zero/layers.0.norm.weight/step.pt");
  EXPECT_EQ(Values(file, file.root()), std::vector<float>{5});
}

// The loader of stages 1 and 2 chunks along a dim, and cuts what does not have the parameter's
// shape.
TEST_F(UniversalViewTest, AZeroDimensionalParameterIsWholeOnEveryRank) {
  Make({}, "tp2_dp2_zero1");
  for (const char* state : {"fp32", "exp_avg", "exp_avg_sq"}) {
    const TorchFile file = Open(StrCat("zero/temperature/", state, ".pt"));
    const TensorNode* tensor = file.root()["param"].Tensor();
    ASSERT_NE(tensor, nullptr);
    EXPECT_TRUE(tensor->shape.empty());
    EXPECT_EQ(file.root()["sub_param_shape"]["shape"].size(), 1u);
    EXPECT_EQ(file.root()["sub_param_shape"]["partition_dim"].Int(), 0);
  }
}

TEST_F(UniversalViewTest, ExpertsAreStackedByExpertRank) {
  TinyStepOptions options;
  options.experts = 4;
  Make(options, "dp4_ep2");
  const auto zero = Names("deepspeed/global_step5/zero");
  EXPECT_TRUE(zero.contains("layers.0.deepspeed_experts.1.weight"));
  EXPECT_FALSE(zero.contains("layers.0.deepspeed_experts.2.weight"));
  const TorchFile file = Open("zero/layers.0.deepspeed_experts.1.weight/fp32.pt");
  EXPECT_EQ(file.root()["is_expert_param"].Bool(), true);
  EXPECT_EQ(file.root()["ep_num_experts"].Int(), 10);  // rows of dim 0
  const auto values = Values(file, file.root()["param"]);
  ASSERT_EQ(values.size(), 80u);
  const AtomIndex first = AtomOf("layers.0.deepspeed_experts.1.weight", "master");
  const AtomIndex second = AtomOf("layers.0.deepspeed_experts.3.weight", "master");
  for (uint64_t i = 0; i < 40; ++i) {
    ASSERT_EQ(values[i], TinyStep::Value(first, i));
    ASSERT_EQ(values[40 + i], TinyStep::Value(second, i));
  }
}

TEST_F(UniversalViewTest, RefusesNamesThatAreNoPathComponents) {
  Make({}, "tp1");
  for (const std::string& name : {std::string("a/b"), std::string(".."), std::string(256, 'x')}) {
    StepModel model = step_->model();
    model.parameters[0].name = name;
    const auto status = OpenOf(model, layout_);
    ASSERT_FALSE(status) << name;
    EXPECT_EQ(status.error().code, ErrorCode::kUnsupported);
  }
}

TEST_F(UniversalViewTest, RefusesANamingNoFamilyKnows) {
  Make({}, "pp2_pipe");
  const auto status = OpenOf(step_->model(), layout_);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("family"), std::string::npos) << status.error().message;
}

TEST_F(UniversalViewTest, RefusesAPatternTheLoaderHasNoWordsFor) {
  Make({}, "tp2");
  StepModel model = step_->model();
  const auto scaled = model.FindParameter("layers.0.qkv.weight");
  model.parameters[static_cast<uint32_t>(*scaled)].pattern.bias_scaled = true;
  EXPECT_FALSE(OpenOf(model, layout_));
  EXPECT_TRUE(OpenOf(model, Layout::Parse("tp1").value()));
}

TEST(PatternOfNameTest, MatchesExactlyItsName) {
  const std::string name = "a.10.b+c.weight";
  EXPECT_TRUE(std::regex_search(name, std::regex(PatternOfName(name, false))));
  EXPECT_FALSE(std::regex_search("a.11.b+c.weight", std::regex(PatternOfName(name, false))));
  EXPECT_TRUE(std::regex_search("a.11.b+c.weight", std::regex(PatternOfName(name, true))));
  EXPECT_FALSE(std::regex_search("aX10.b+c.weight", std::regex(PatternOfName(name, true))));
}

}  // namespace
}  // namespace ckptfs::deepspeed
