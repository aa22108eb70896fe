// SPDX-License-Identifier: Apache-2.0
//
// StepFiles are the files of one model that the ranks of an FSDP job wrote each for itself, as
// verl's FSDPCheckpointManager and SkyRL's FSDPStrategy do:
//
//   model_world_size_<W>_rank_<R>.pt        the state_dict of rank R of W
//   optim_world_size_<W>_rank_<R>.pt        the optimizer's
//   extra_state_world_size_<W>_rank_<R>.pt  its scheduler and random states
//   fsdp_config.json                        {"FSDP_version" or "fsdp_strategy", "world_size"}
//   huggingface/                            config.json, tokenizer
//
// They lie in a step's directory, or in a folder of it for each model:
//
//   <run>/global_step_3/actor/              verl; critic/ beside it
//   <run>/global_step_3/policy/             SkyRL
//   <run>/global_step_3/                    verl's SFT trainer
//   <run>/latest_checkpointed_iteration.txt verl: "3", written after all of a step
//   <run>/latest_ckpt_global_step.txt       SkyRL: the same
//
// As of verl 0.7 and SkyRL of August 2026.
//
// Thread safety: pure but for listing and reading small files.

#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_tree.h"

namespace ckptfs::rank_shards {

enum class FileKind : uint8_t { kModel, kOptimizer, kExtra };

// "model_world_size_4_rank_1.pt"
std::string FileName(FileKind kind, uint64_t world, uint64_t rank);

struct StepFiles {
  uint64_t world = 0;
  std::set<uint64_t> model, optimizer, extra;  // ranks below `world` with a file of that kind
  std::set<uint64_t> other_worlds;             // of files that are there, too
  // As fsdp_config.json says them; nothing without one.
  std::optional<uint64_t> configured;  // the world size
  std::string tool;                    // "verl", "SkyRL"; "" where it does not tell
  bool flat = false;                   // FSDP1: the optimizer has flat parameters
};

// True if a file of a rank's model is among the entries, by its name.
bool HasFiles(const StepEntries& entries);

// Nothing if the directory has no file of a rank's model.  BLOCKS: on listing.
// Without fsdp_config.json the world size is the only one that there is; else the one it says.
Result<std::optional<StepFiles>> ListFiles(const Root& root, const std::string& directory);

// kInvalid names the first file that is missing.
Status CheckWhole(const StepFiles& files, std::string_view path, bool weights_only);

// The folders of a step's directory that hold a model each, the step's own first (actor, policy).
Result<std::vector<std::string>> ModelFolders(const Root& root, const std::string& directory);

// The note of a tool's newest step, which it writes beside the steps.
struct Tracker {
  FormatOrder format = FormatOrder::kNone;  // whose it is
  std::optional<uint64_t> number;           // as it says
};
// Nothing without one.  Errors are those of a device.
Result<std::optional<Tracker>> FindTracker(const Root& root, const std::string& run);

}  // namespace ckptfs::rank_shards
