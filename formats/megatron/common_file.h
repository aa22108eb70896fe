// SPDX-License-Identifier: Apache-2.0
//
// CommonFile is common.pt of a view: what all ranks of a job that loads it have in common.  Cores
// up to 0.18 need it, and later ones read it where it is there.
//
//   args                 a Namespace: the source's job's, with the layout's degrees, or the sizes
//                        that Megatron compares with its own (check_checkpoint_args).  no_save_rng
//                        is True, and no_save_optim where there is no optimizer: both have a job
//                        not ask for these, without a flag of its own
//   checkpoint_version   3.0
//   iteration            the step's
//   content_metadata     how the optimizer is cut (fully_reshardable), and how keys are spelled
//   optimizer            the dicts of its groups
//   opt_param_scheduler  of a DeepSpeed step: the samples that it has seen, and None for all else
//   ...                  all else that a Megatron step has: its schedule, counters
//
// Source: megatron/training/checkpointing.py of core 0.16 to 0.20.
//
// Thread safety: pure functions.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/megatron/target_groups.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::megatron {

// The rest of a file: arguments that come before all others, and entries of its dict.
struct CommonAdditions {
  using Entries = std::vector<std::pair<std::string, NodeId>>;
  std::function<Entries(PickleBuilder&)> arguments = nullptr;
  std::function<Result<Entries>(ArchiveBuilder&)> entries = nullptr;
};

// `config`: the model's config.json, or "".
Result<ArchiveContent> CommonFile(const ShownState& shown,
                                  const std::optional<TargetGroups>& groups,
                                  std::string_view config, const CommonAdditions& more = {});

}  // namespace ckptfs::megatron
