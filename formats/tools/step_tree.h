// SPDX-License-Identifier: Apache-2.0
//
// StepTree is what lies at a path where steps are looked for: the entries of the
// directory and, when they are asked for, those of the directories in it.  Every
// source that looks for what training tools write goes through it, so that all
// have the same idea of what is a step's own directory:
//
//   <run>/checkpoint-500/global_step500/    Trainer; the step is checkpoint-500
//   <run>/step_500/pytorch_model/           accelerate; step_500
//   <run>/epoch=1-step=500.ckpt/checkpoint/ Lightning; epoch=1-step=500.ckpt
//
// A link to another entry beside it is that entry's second name ("last.ckpt",
// "best"), and no step of its own.
//
// Thread safety: none; one thread looks at one path.
// Lifetime: keeps the root.

#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/state/source.h"

namespace ckptfs {

// Directories of one directory that are looked into.
inline constexpr size_t kMaxStepDirectories = 1 << 16;

// The names in a directory, sorted.
struct StepEntries {
  std::vector<std::string> files;
  std::vector<std::string> directories;
  std::set<std::string, std::less<>> links;  // of the directories those that are symbolic links

  bool HasFile(std::string_view name) const;
  bool HasDirectory(std::string_view name) const;
};

// Second names of directories and of Lightning's files beside them are left out; a link
// that leads nowhere counts as a file.  kUnsupported where more than
// kMaxStepDirectories directories are in one.
Result<StepEntries> ListStepEntries(const Root& root, const std::string& directory);

// The tool that wrote around a step, as far as names tell (formats/tools/save_order.h).
enum class StepTool { kNone, kTrainer, kAccelerate, kLightning };

inline constexpr std::string_view kTrainerState = "trainer_state.json";
// lightning/fabric/strategies/fsdp.py 2.6: _METADATA_FILENAME, all of a checkpoint of Lightning's
// strategies but the states; written after what DCP writes.
inline constexpr std::string_view kLightningMeta = "meta.pt";

// The run's directory of a step that was given by itself: that above it where its
// name has a number, else the step's own.
std::string RunOfToolStep(const std::string& directory, std::string_view name);

// A directory that cannot be looked into, holds more than is looked into, or is not there any
// more: nothing of ours, and no reason to refuse what lies beside it.
bool IsOutOfReach(const Error& error);

// The step whose files lie in a directory, named and numbered as that is, of a run in `save`.
Result<StepCandidate> StepAt(const std::shared_ptr<const Root>& root, const std::string& directory,
                             const std::string& save);

// A directory of a training tool that holds all of one step; its run is above it.
// REQUIRES: `directory` is not the root itself.
Result<StepCandidate> ToolStep(const std::shared_ptr<const Root>& root,
                               const std::string& directory);

}  // namespace ckptfs
