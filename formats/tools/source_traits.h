// SPDX-License-Identifier: Apache-2.0
//
// SourceTraits says what steps of one source are like where views differ by it.  A view asks for a
// trait, never for a source's name.  Steps of manifests of any age have the traits of the source
// that they name; those of any other source (rank files of a job) have none.
//
// Thread safety: constants; a pure function.

#pragma once

#include <algorithm>
#include <array>
#include <string_view>

#include "core/model/step_model.h"

namespace ckptfs {

struct SourceTraits {
  std::string_view source;  // StepModel::framework
  // An engine of DeepSpeed saved it: its files and hyper-parameters are the engine's.
  bool engine = false;
  // Its Adams are fused ones (DeepSpeed's, Apex's, Transformer Engine's), which have no words for
  // what torch's ask for by name.
  bool fused_adam = false;
  // Members of groups are in the order in which the optimizer had them.
  bool member_order = false;
  // States are as torch's own optimizers have them: a job counts steps as they do.
  bool torch_states = false;
  // torch.distributed.checkpoint saved it.  Classes in documents are what torch itself loads from
  // the source, and a state of any shape is whole.
  bool own_keys = false;
  // A job of megatron-core saved it: names, groups and the common state are such a job's.
  bool mcore_state = false;
  // from_pretrained reads the source's own files.
  bool pretrained = false;
};

inline constexpr SourceTraits kNoTraits{};
inline constexpr auto kSourceTraits = std::to_array<SourceTraits>({
    {.source = "deepspeed", .engine = true, .fused_adam = true, .member_order = true},
    {.source = "deepspeed_universal", .engine = true, .fused_adam = true},
    {.source = "megatron", .fused_adam = true, .mcore_state = true},
    {.source = "megatron_fsdp", .fused_adam = true, .mcore_state = true},
    {.source = "megatron_legacy", .fused_adam = true, .mcore_state = true},
    {.source = "dcp", .torch_states = true, .own_keys = true},
    {.source = "rank_shards", .torch_states = true},
    {.source = "huggingface", .torch_states = true, .pretrained = true},
});

inline const SourceTraits& TraitsOf(const StepModel& step) {
  const auto found = std::ranges::find(kSourceTraits, step.framework, &SourceTraits::source);
  return found == kSourceTraits.end() ? kNoTraits : *found;
}

}  // namespace ckptfs
