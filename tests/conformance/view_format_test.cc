// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "formats/dcp/view.h"
#include "formats/deepspeed/native_view/native_view.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/huggingface/view.h"
#include "formats/megatron/legacy/view.h"
#include "formats/megatron/view.h"
#include "formats/rank/rank_view.h"
#include "formats/registry.h"
#include "formats/resume/resume_view.h"
#include "tests/conformance/view_format_suite.h"

namespace ckptfs {
namespace {

template <class Format>
std::unique_ptr<ViewFormat> Make() {
  return std::make_unique<Format>();
}

ViewFormatCase Case(std::string name, bool rank, std::string layout, TinyStepOptions step = {}) {
  return {std::move(name), rank ? Make<RankFormat> : Make<deepspeed::UniversalFormat>, step,
          std::move(layout)};
}

ViewFormatCase Native(std::string name, std::string layout, TinyStepOptions step = {}) {
  step.configured = true;
  return {std::move(name), Make<deepspeed::NativeFormat>, step, std::move(layout)};
}

ViewFormatCase HuggingFace(std::string name, std::string layout, TinyStepOptions step = {}) {
  const auto make = [] {
    ModelFiles models;
    for (const char* file : {"config.json", "tokenizer.json"}) {
      models.files.push_back(
          {file, std::make_shared<const std::string>(R"({"dtype": "float32"})")});
    }
    return std::make_unique<HuggingFaceFormat>(std::move(models));
  };
  return {std::move(name), make, step, std::move(layout)};
}

ViewFormatCase Resume(std::string name, StepTool tool, std::string layout,
                      TinyStepOptions step = {}) {
  const auto make = [tool] { return std::make_unique<ResumeFormat>(tool); };
  step.tool = make()->name();
  return {std::move(name), make, step, std::move(layout)};
}

// Cuts whatever has 64 bytes.
ViewFormatCase Dcp(std::string name, std::string layout, TinyStepOptions step = {}) {
  const auto make = [] { return std::make_unique<DcpFormat>(64); };
  return {std::move(name), make, step, std::move(layout)};
}

// Cuts whatever has 64 bytes.
ViewFormatCase Megatron(std::string name, std::string layout, TinyStepOptions step = {}) {
  const auto make = [] {
    return std::make_unique<MegatronFormat>(Translations::Make(std::nullopt).value(), std::nullopt,
                                            64);
  };
  step.megatron = true;
  return {std::move(name), make, step, std::move(layout)};
}

ViewFormatCase MegatronLegacy(std::string name, std::string layout, TinyStepOptions step = {}) {
  const auto make = [] {
    return std::make_unique<MegatronLegacyFormat>(Translations::Make(std::nullopt).value(),
                                                  std::nullopt);
  };
  step.megatron = true;
  return {std::move(name), make, step, std::move(layout)};
}

TinyStepOptions Experts() {
  TinyStepOptions options;
  options.experts = 4;
  return options;
}

TinyStepOptions Lazy() {
  TinyStepOptions options;
  options.weights = false;
  options.lazy_state = true;
  options.python_step = true;
  options.groups = 2;
  return options;
}

const std::vector<ViewFormatCase>& Cases() {
  static const std::vector<ViewFormatCase> cases = {
      Case("rank_whole", true, "tp1"),
      Case("rank_tp2_pp2", true, "tp2_pp2"),
      Case("rank_tp4_zero1_dp3", true, "tp4_dp3_zero1"),
      Case("rank_fp32_masters_only", true, "dp12_zero2_fp32", Lazy()),
      Case("rank_experts", true, "tp2_dp4_ep4_zero1_bf16", Experts()),
      Case("deepspeed_whole", false, "tp1"),
      Case("deepspeed_tp2_pp2", false, "tp2_pp2_dp4"),
      Case("deepspeed_lazy", false, "dp2_zero1", Lazy()),
      Native("deepspeed_native_tp2", "tp2_dp3_zero1"),
      Native("deepspeed_native_lazy", "dp2_zero2_fp32", Lazy()),
      Native("deepspeed_native_sub_groups", "dp3_zero3", Lazy()),
      HuggingFace("huggingface_whole", "tp1"),
      HuggingFace("huggingface_masters_only", "dp2_zero1_bf16", Lazy()),
      Resume("trainer_tp2", StepTool::kTrainer, "tp2_dp2_zero1"),
      Resume("accelerate_lazy", StepTool::kAccelerate, "dp3_zero2", Lazy()),
      Resume("lightning_whole", StepTool::kLightning, "tp1"),
      Resume("trainer_fsdp", StepTool::kTrainer, "dp3_fp32_accelerate", Lazy()),
      Resume("accelerate_fsdp", StepTool::kAccelerate, "tp2_dp2_accelerate"),
      Case("deepspeed_experts", false, "dp4_ep2", Experts()),
      Dcp("dcp_whole", "tp1"),
      Dcp("dcp_fsdp_tp", "tp2_dp4_fp32"),
      Dcp("dcp_uneven_shards", "dp3_cp2", Lazy()),
      Dcp("dcp_flat", "tp3_dp5_bf16_flat", Lazy()),
      Dcp("dcp_titan", "pp2_dp2_titan", Experts()),
      Megatron("megatron_whole", "tp1"),
      Megatron("megatron_tp2_experts", "tp2_pp2_dp2_ep2", Experts()),
      Megatron("megatron_masters_only", "tp4_fp32", Lazy()),
      MegatronLegacy("megatron_legacy_tp2_pp2", "tp2_pp2"),
      MegatronLegacy("megatron_legacy_experts", "pp2_dp2_ep2", Experts()),
  };
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Views, ViewFormatSuite, testing::ValuesIn(Cases()),
                         [](const auto& view) { return view.param.name; });

// A new format cannot forget the suite.
TEST(ViewFormatCases, CoverTheRegistry) {
  for (const auto& format : MakeViewFormats()) {
    EXPECT_TRUE(std::any_of(Cases().begin(), Cases().end(), [&](const auto& one) {
      return one.format()->name() == format->name();
    })) << format->name();
  }
}

}  // namespace
}  // namespace ckptfs
