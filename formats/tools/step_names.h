// SPDX-License-Identifier: Apache-2.0
//
// These functions read the names of training tools' directories and files:
//
//   checkpoint-500                  transformers' Trainer
//   checkpoint_3, step_500, epoch_2 accelerate: its own naming, and its examples'
//   step-500                        torchtitan
//   epoch=1-step=500.ckpt           Lightning; also -v1.ckpt, last.ckpt
//   global_step500                  DeepSpeed
//   iter_0000500                    Megatron
//   ep0-ba500, iter-000500-ckpt, step500-unsharded, epoch_1_step_500, 500    Composer, LLM-foundry,
//                                   OLMo, scripts
//   ckpt_500.pth, model_0000500.pth, checkpoint0010.pth.tar    files of scripts
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ckptfs {

// The number of a step that is named in one of these forms; nothing for other names
// and for numbers beyond 64 bits.  0 of a step in an epoch, which does not tell their order.
std::optional<uint64_t> StepNumber(std::string_view name);

// The same of a file of weights, without its suffixes; other words count there, too.
std::optional<uint64_t> FileNumber(std::string_view name);

// The number in which a name differs from others beside it that are like it but for numbers
// ("G_800.pth", "G_1000.pth"; `names` may have the name itself), in any tool's form.  Nothing if
// there are none, or several of its numbers order them otherwise.
std::optional<uint64_t> SiblingNumber(std::string_view name, std::span<const std::string> names);

// True if the number of a file's name counts epochs ("epoch_8.pth").
bool CountsEpochs(std::string_view name);

// True if a text ends in a word of ranks or of other trainings ("tp-rank-", "fold"), so that a
// number behind it does not count steps.
bool EndsInRank(std::string_view text);

// "checkpoint-500", which only transformers' Trainer and its imitators write.
bool IsTrainerName(std::string_view name);

// A name that Lightning gives where another save has the name already: "a-v2.ckpt" is the third of
// "a.ckpt".
struct VersionedName {
  std::string first;     // "a.ckpt"
  uint32_t version = 0;  // 2
};
std::optional<VersionedName> VersionOf(std::string_view name);

// "....ckpt" with a name before it: Lightning's, a file or a directory.
bool IsLightningName(std::string_view name);

}  // namespace ckptfs
