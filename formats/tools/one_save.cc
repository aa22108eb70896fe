// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/one_save.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTrainingArguments = "training_args.bin";

bool IsWholeOptimizer(std::string_view name) {
  return name == "optimizer.pt" || name == "optimizer.bin";
}

// Folders in which FSDP and engines keep states.
std::vector<std::string> FoldersOfStates(const StepEntries& entries) {
  const bool engine = entries.HasFile("latest");
  std::vector<std::string> out;
  std::ranges::copy_if(entries.directories, std::back_inserter(out), [&](const std::string& name) {
    return name.starts_with("pytorch_model_fsdp_") || name.starts_with("optimizer_") ||
           (engine && (name == "pytorch_model" || name.starts_with("global_step")));
  });
  return out;
}

// Files that Trainer does not write with save_only_model.
bool IsOfTraining(std::string_view name) {
  return IsWholeOptimizer(name) || name == "scheduler.pt" || name == "scaler.pt" ||
         name.starts_with("rng_state");
}

bool IsWeights(std::string_view name) {
  return name.starts_with("model.") || name.starts_with("model-") ||
         name.starts_with("pytorch_model");
}

Error Mixed(std::string why) {
  return Error{ErrorCode::kInvalid, std::move(why) + ": parts of two saves are in one directory"}
      .Needing("remove the parts of the earlier save");
}

// True if training_args.bin says that Trainer saves no optimizer; false where it cannot be read.
Result<bool> SavesOnlyModel(const Root& root, const std::string& directory) {
  auto opened = root.Open(JoinPath(directory, kTrainingArguments));
  const auto file = opened ? TorchFile::Open(*std::move(opened)) : Fail(Error(opened.error()));
  if (!file && IsOfDevice(file.error())) return Fail(Error(file.error()));
  return file && file->root()["save_only_model"].Bool() == true;
}

}  // namespace

Status CheckOneSave(const Root& root, const std::string& directory, StepTool tool,
                    const StepEntries& entries) {
  if (tool != StepTool::kTrainer && tool != StepTool::kAccelerate) return {};
  const std::vector<std::string> folders = FoldersOfStates(entries);
  const auto whole = std::ranges::find_if(entries.files, IsWholeOptimizer);
  const bool optimizer = whole != entries.files.end();
  if (!folders.empty() && optimizer) {
    return Fail(Mixed(StrCat(root.PathOf(directory), ": ", *whole,
                             " lies beside sharded states of an optimizer")));
  }
  if ((folders.empty() && !optimizer) || tool != StepTool::kTrainer ||
      !entries.HasFile(kTrainingArguments)) {
    return {};
  }
  // At ZeRO 3 without gathered weights Trainer saves the engine whole, in their stead.
  if (!optimizer && std::ranges::none_of(entries.files, IsWeights)) return {};
  CKPT_ASSIGN_OR_RETURN(const bool only_model, SavesOnlyModel(root, directory));
  if (!only_model) return {};
  std::string names;
  for (const std::string& name : folders) names += StrCat(names.empty() ? "" : ", ", name, "/");
  for (const std::string& name : entries.files) {
    if (IsOfTraining(name)) names += StrCat(names.empty() ? "" : ", ", name);
  }
  return Fail(Mixed(StrCat(root.PathOf(directory), ": ", names, " beside a ", kTrainingArguments,
                           " that says save_only_model")));
}

}  // namespace ckptfs
