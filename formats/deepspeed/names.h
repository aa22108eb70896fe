// SPDX-License-Identifier: Apache-2.0
//
// The file names of a native DeepSpeed checkpoint (deepspeed 0.14 - 0.19.7,
// runtime/engine.py _get_*_ckpt_name, runtime/pipe/module.py ckpt_layer_path):
//
//   <save>/latest                                             tag, no newline
//   <tag>/mp_rank_MM_model_states.pt                          stages 0, 1, 2
//   <tag>/zero_pp_rank_D_mp_rank_MM_model_states.pt           stage 3
//   <tag>/[bf16_|fp16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt
//   <tag>/layer_LL[-model_TT]-model_states.pt                 PipelineModule
//   <tag>/layer_L_expert_E_mp_rank_MM_model_states.pt         native MoE
//   <tag>/expp_rank_P_mp_rank_MM_optim_states.pt              MoE without ZeRO
//
// Numbers are decimal with a minimum width; they are compared as numbers, so
// 100 ranks and more keep their order.
//
// Thread safety: values and pure functions.

#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs::deepspeed {

// Begins the names of what a pipeline's layers share ("tied_modules.embed.weight").
inline constexpr std::string_view kTiedModules = "tied_modules.";

// Model-parallel rank first, so that iteration is in dp order within one.
struct RankKey {
  uint32_t mp = 0;
  uint32_t dp = 0;
  auto operator<=>(const RankKey&) const = default;
};

struct LayerKey {
  uint32_t layer = 0;
  uint32_t tp = 0;
  auto operator<=>(const LayerKey&) const = default;
};

struct ExpertKey {
  uint32_t layer = 0;
  uint32_t expert = 0;
  uint32_t mp = 0;
  auto operator<=>(const ExpertKey&) const = default;
};

struct StepFiles {
  std::map<uint32_t, std::string> model;  // by mp rank
  std::map<RankKey, std::string> stage3_model;
  std::map<RankKey, std::string> optimizer;
  std::map<LayerKey, std::string> layers;
  std::map<ExpertKey, std::string> experts;
  std::map<RankKey, std::string> expert_optimizer;  // dp: the expert-parallel rank
  bool offloaded = false;                           // a folder of swapped tensors

  // Degrees that the names of the files tell: one more than their greatest rank.
  uint32_t DataRanks() const;
  uint32_t ModelRanks() const;

  // Engines before 0.19.6 put a Ulysses rank's place among its sequence's ranks where a
  // model-parallel rank stands: rank d of N has "zero_pp_rank_<d>_mp_rank_<d % degree>".  Gives
  // that degree if all names of ZeRO's files say so, each rank once; else 1.
  uint32_t SequenceDegree() const;
  // Files every rank under model-parallel rank 0.  REQUIRES: SequenceDegree() > 1.
  void DropSequenceRanks();

  bool IsDeepSpeed() const { return !model.empty() || !stage3_model.empty() || !optimizer.empty(); }
};

// Adds one directory entry; kInvalid if the same rank has two files (both
// precision prefixes, or 1 and 01).
Status ClassifyFile(std::string_view name, StepFiles& files);

// The regular files of a tag directory.
Result<StepFiles> ListStep(const Root& root, const std::string& directory);

// "12" of "global_step12"; the last number of any tag, 0 without one.
uint64_t IterationOfTag(std::string_view tag);

// True if a text can be a tag: the name of a directory below the save directory,
// which may lie deeper ("epoch1/step5").
bool IsTagName(std::string_view tag);

// First line of a pointer file (`latest`, `latest_universal`), stripped;
// nothing if there is no such file.
Result<std::optional<std::string>> ReadPointer(const Root& root, const std::string& path);

}  // namespace ckptfs::deepspeed
