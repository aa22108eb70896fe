// SPDX-License-Identifier: Apache-2.0
//
// Save order: the files that training tools and formats write of a step, their order, and the proof
// that a save is over.  There is one table (kOrders in save_order.cc; each row lists the files),
// signs by which the entries of a directory tell the tool, and one evaluation of both.
//
//   writer                 last                        lies in           without it
//   transformers' Trainer  trainer_state.json          the step          a sign: begun; by name:
//   all but last accelerate             random_states_0.pkl, then   the step          likewise
//                          as many custom_checkpoint_N as the step before has
//   Lightning, sharded     meta.pt                     DCP's directory   likewise
//   DCP                    .metadata                   each part         provisional
//   DeepSpeed              latest                      beside the tag    provisional
//   megatron-core          metadata.json               DCP's directory   begun
//   Megatron's ranks       latest_checkpointed_        beside the step   provisional
//                          iteration.txt
//   verl                   latest_checkpointed_        beside the step   provisional
//                          iteration.txt
//   SkyRL                  latest_ckpt_global_step.txt beside the step   provisional
//
// As written by transformers 5.23, accelerate 1.15, Lightning 2.6, DeepSpeed 0.19, torch 2.13,
// megatron-core 0.16, verl 0.7, SkyRL of August 2026.
//
// Thread safety: pure but for the root that is listed.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/state/source.h"
#include "core/state/tool_names.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {

// Returns the tool that wrote around a step, by a directory's name and what is in it.
StepTool ToolOf(std::string_view name, const StepEntries& entries);
// "transformers' Trainer"; empty for kNone.
std::string_view ToolName(StepTool tool);

// A format's own order, of what no tool wrote around, or a tool whose order tells nothing.
enum class FormatOrder { kNone, kDcp, kDeepSpeed, kMegatron, kMegatronLegacy, kVerl, kSkyRl };

// Where the files of one step's save lie, below the root.
struct SavePlaces {
  std::string own;  // what a tool wrote around the step; "" where that is not asked
  FormatOrder format = FormatOrder::kNone;
  std::vector<std::string> parts = {};  // directories in which the format writes a last file each
};

// How far the save of a step is of which the format misses no file.  kInvalid is the error of one
// that a tool has begun; with options.weights_only no tool's file is missed for certain.
// BLOCKS: on listing the step, the steps before it and, once a look, their run.
SaveState StateOfSave(const StepCandidate& step, const SavePlaces& places,
                      const SourceOptions& options, const SaveHistory& history);

// Says what a directory lacks that is named as a step and no source knows: "no weights yet".
std::string MissingOfBegun(const StepEntries& entries);

// Names that tools and programs that copy give to what they write.
const ToolNames& NamesOfTools();

}  // namespace ckptfs
