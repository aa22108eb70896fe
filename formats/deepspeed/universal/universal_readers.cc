// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_readers.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kAdam[] = {"exp_avg", "exp_avg_sq", "step"};
// transformers.Adafactor keeps the last root mean square, and computes it before it reads it.
constexpr std::string_view kMadeAnew[] = {"RMS"};
// Hyper-parameters of torch.optim.Muon, and of DeepSpeed's, whose momentum of a rank is that of the
// whole parameters that touch its partition (_muon_momentum_buffer of
// runtime/zero/stage_1_and_2.py).
constexpr std::string_view kOfMuon[] = {"use_muon", "ns_coefficients", "ns_steps", "ns_method"};
constexpr WholeState kWhole[] = {{"momentum_buffer", kOfMuon}};

constexpr ReaderDemands kStagesOneAndTwo = {
    .reader = "a DeepSpeed engine at ZeRO-1 or 2",
    .remedy = "dcp/ and rank<N>/optimizer.safetensors have every state",
    .made_anew = kMadeAnew,
    .whole = kWhole,
    .counts = ReaderDemands::Counts::kPerGroup,
    .flat = true,
    .numbers = false,
    .own_shapes = false,
    .optimizers = false,
    .slice_unit = 2,  // nccl_start_alignment_factor
};

constexpr ReaderDemands kStageThree = {
    .reader = "a DeepSpeed engine at ZeRO-3",
    .remedy =
        "engines at ZeRO 1 and 2 take states by any name: ask for zero1 or zero2 in the layout",
    .asks = kAdam,
    .takes = kAdam,
    .made_anew = kMadeAnew,
    .counts = ReaderDemands::Counts::kOnce,
    .flat = true,
    .numbers = false,
    .own_shapes = false,
    .optimizers = false,
};

}  // namespace

const ReaderDemands& UniversalReader(const Layout& layout) {
  return layout.zero == 3 ? kStageThree : kStagesOneAndTwo;
}

bool StageThreeLoads(const ShownState& shown) {
  return CheckDemands(shown, kStageThree, Layout{}).has_value();
}

}  // namespace ckptfs::deepspeed
