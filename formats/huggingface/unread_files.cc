// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/unread_files.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/optimizer_file.h"
#include "formats/huggingface/torch_state.h"
#include "formats/huggingface/weights_file.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

constexpr size_t kMostFiles = 32;  // that are looked into
constexpr size_t kMostInFolder = 4;
constexpr std::string_view kSafetensors = ".safetensors";
constexpr std::array<std::string_view, 6> kTorch = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar"};
// Names of moments, in whatever spelling of the rest.
constexpr std::array<std::string_view, 3> kMoments = {"exp_avg", "momentum_buffer", "square_avg"};

bool EndsAs(std::string_view name, std::span<const std::string_view> suffixes) {
  return std::ranges::any_of(suffixes,
                             [&](std::string_view suffix) { return name.ends_with(suffix); });
}

bool HasTensors(const std::string& name) {
  return EndsAs(name, kTorch) || name.ends_with(kSafetensors);
}

// Files whose content another line tells, or that have neither model nor optimizer.
bool IsKnown(const std::string& name) {
  const auto weights = ChooseWeights(std::span(&name, 1));
  return (weights && *weights) || name.find("-of-") != std::string::npos ||
         name == "training_args.bin" || name.starts_with("rng_state") ||
         name.starts_with("random_states_") || name.starts_with("scheduler") ||
         name.starts_with("sampler") || name.starts_with("custom_checkpoint_") ||
         IsOptimizerFile(name) || IsOtherModel(name);
}

enum class Holds : uint8_t { kNothing, kModel, kOptimizer };

Result<Holds> LookInto(const Root& root, const std::string& path) {
  if (path.ends_with(kSafetensors)) {
    CKPT_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(root, path));
    const bool moments = std::ranges::any_of(header.entries, [](const SafetensorsEntry& entry) {
      return std::ranges::any_of(kMoments, [&](std::string_view moment) {
        return entry.name.find(moment) != std::string::npos;
      });
    });
    if (moments) return Holds::kOptimizer;
    return header.entries.empty() ? Holds::kNothing : Holds::kModel;
  }
  CKPT_ASSIGN_OR_RETURN(auto file, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const TorchFile torch, TorchFile::Open(std::move(file)));
  const TorchState state(torch.root());
  if (!state.optimizers().empty()) return Holds::kOptimizer;
  return state.Modules().empty() ? Holds::kNothing : Holds::kModel;
}

// Looks into the first of the files, and passes over those that cannot be read.
Status LookIntoAll(const Root& root, const std::string& prefix, std::span<const std::string> names,
                   const std::function<void(const std::string& name, Holds)>& tell) {
  for (const std::string& name : names.first(std::min(names.size(), kMostFiles))) {
    const auto holds = LookInto(root, prefix + name);
    if (!holds && IsOfDevice(holds.error())) return Fail(Error(holds.error()));
    if (holds) tell(name, *holds);
  }
  return {};
}

// Folders that are not another step, an adapter, sentence-transformers' or an engine's.
Result<std::vector<std::string>> FilesIn(const Root& root, const std::string& prefix,
                                         const std::string& folder) {
  std::vector<std::string> out;
  if (StepNumber(folder) || IsDigit(folder.front())) return out;
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, prefix + folder));
  if (entries.HasFile(std::string(kAdapterConfig)) || entries.HasFile(".metadata")) return out;
  bool shard = false;  // one of several tells of all
  for (const std::string& name : entries.files) {
    if (out.size() == kMostInFolder) break;
    const bool another = name.find("-of-") != std::string::npos && std::exchange(shard, true);
    if (HasTensors(name) && !another) out.push_back(StrCat(folder, "/", name));
  }
  return out;
}

// Tells those of the files below the directory that hold the kind.
Status LeaveOutHolders(const Root& root, const std::string& directory,
                       std::span<const std::string> names, Holds kind,
                       const std::function<void(const std::string& name)>& tell) {
  return LookIntoAll(root, directory.empty() ? "" : directory + "/", names,
                     [&](const std::string& name, Holds holds) {
                       if (holds == kind) tell(name);
                     });
}

}  // namespace

Status LeaveOutUnreadFiles(const StepFiles& files, const Root& root, StepModel& header) {
  std::vector<std::string> names = files.others;
  for (const std::string& folder : files.folders) {
    auto found = FilesIn(root, files.prefix, folder);
    if (!found && IsOfDevice(found.error())) return Fail(std::move(found).error());
    if (found) std::ranges::move(*found, std::back_inserter(names));
  }
  std::set<std::string, std::less<>> folders;  // that are told
  const auto tell = [&](const std::string& name, Holds holds) {
    const std::string folder = ParentPath(name);
    if (holds == Holds::kModel && !folder.empty() && folders.insert(folder).second) {
      LeaveOut(header, {LeftOutPart::kModel, StrCat("'", folder, "/'"),
                        StrCat("a step has one model, and this one's is ", files.Taken()),
                        "adopt that folder by itself"});
    }
    if (holds == Holds::kOptimizer) {
      LeaveOut(header, {LeftOutPart::kOptimizer, StrCat("the optimizer in ", name),
                        "beside weights only optimizer.pt and optimizer.bin are read",
                        name.ends_with(kSafetensors)
                            ? ""
                            : "if it is of these weights, give it the name optimizer.pt"});
    } else if (holds == Holds::kModel && folder.empty()) {
      LeaveOut(header,
               {LeftOutPart::kModel, StrCat("'", name, "'"),
                StrCat("the step's model is ", files.Taken(), ", and loaders do not read both"),
                "adopt that file by itself"});
    }
  };
  std::erase_if(names, [](const std::string& name) {
    return !HasTensors(name) || (IsKnown(name) && ParentPath(name).empty()) ||
           IsOptimizerFile(LastComponent(name));
  });
  return LookIntoAll(root, files.prefix, names, tell);
}

Status LeaveOutOptimizers(const Root& root, const std::string& directory,
                          std::span<const std::string> names, std::string_view why,
                          StepModel& header) {
  std::vector<std::string> saved;
  std::ranges::copy_if(names, std::back_inserter(saved),
                       [](const std::string& name) { return EndsAs(name, kTorch); });
  return LeaveOutHolders(root, directory, saved, Holds::kOptimizer, [&](const std::string& name) {
    LeaveOut(header,
             {LeftOutPart::kOptimizer, StrCat("the optimizer in ", name), std::string(why), ""});
  });
}

Status LeaveOutModels(const Root& root, const std::string& directory,
                      std::span<const std::string> names, std::string_view why, StepModel& header) {
  std::vector<std::string> saved;
  std::ranges::copy_if(names, std::back_inserter(saved),
                       [](const std::string& name) { return HasTensors(name) && !IsKnown(name); });
  return LeaveOutHolders(root, directory, saved, Holds::kModel, [&](const std::string& name) {
    LeaveOut(header, {LeftOutPart::kModel, StrCat("'", name, "'"), std::string(why),
                      "adopt that file by itself"});
  });
}

Status LeaveOutAdapters(const StepFiles& files, const Root& root, StepModel& header) {
  for (const std::string& folder : files.folders) {
    const std::string config = StrCat(files.prefix, folder, "/", kAdapterConfig);
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(root, config));
    if (!there) continue;
    LeaveOut(header, {LeftOutPart::kModel, StrCat("'", folder, "/'"),
                      "it is another adapter (PEFT)", "adopt that folder by itself"});
  }
  return {};
}

}  // namespace ckptfs::huggingface
