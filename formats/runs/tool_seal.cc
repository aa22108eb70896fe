// SPDX-License-Identifier: Apache-2.0

#include "formats/runs/tool_seal.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/model_files/directories.h"
#include "formats/runs/step_names.h"
#include "formats/runs/step_tree.h"

namespace ckptfs {
namespace {

constexpr std::string_view kRandomState = "random_states_0.pkl";
constexpr std::string_view kTrainingArguments = "training_args.bin";  // written with the weights
constexpr std::string_view kShardedByFsdp = "pytorch_model_fsdp";  // ..._0/, or in one file .bin
constexpr std::string_view kCustom = "custom_checkpoint_";  // objects that accelerate was given
constexpr std::string_view kOptimizer = "optimizer";  // of FSDP: ..._0/, or .bin
constexpr size_t kMaxEarlier = 2;  // steps of the same run that are looked at

struct Last {
  std::string_view file;
  std::string_view writer;
};

// What a tool writes last.  REQUIRES: a tool.
Last LastOf(StepTool tool) {
  switch (tool) {
    case StepTool::kNone: break;
    case StepTool::kTrainer: return {kTrainerState, "Trainer"};
    case StepTool::kAccelerate: return {kRandomState, "accelerate"};
    case StepTool::kLightning: return {kLightningMeta, "Lightning"};
  }
  return {};
}

bool HasRandomStates(const StepEntries& entries) {
  return std::ranges::any_of(entries.files, IsRandomStates);
}

bool Has(const StepEntries& entries, std::string_view prefix) {
  const auto is = [&](const std::string& name) { return name.starts_with(prefix); };
  return std::ranges::any_of(entries.directories, is) || std::ranges::any_of(entries.files, is);
}

// The tool whose last file is yet to be written, as far as what is there tells.  Weights and
// optimizer that are both there may be a script's own.
StepTool WritingByItself(std::string_view name, const StepEntries& entries) {
  const bool trainers = IsTrainerName(name);
  if (trainers && entries.HasFile(kTrainingArguments)) return StepTool::kTrainer;
  if (Has(entries, kShardedByFsdp) && !Has(entries, kOptimizer)) {
    return trainers ? StepTool::kTrainer : StepTool::kAccelerate;
  }
  return entries.HasDirectory("pytorch_model") ? StepTool::kAccelerate : StepTool::kNone;
}

// "checkpoint-" of "checkpoint-500": steps of one run have it in common.
std::string_view WithoutNumber(std::string_view name) {
  return name.substr(0, name.find_last_not_of("0123456789") + 1);
}

// What is in the steps before `own` in the same run, the nearest first; those that
// are out of reach are passed over.
Result<std::vector<StepEntries>> EarlierSteps(const Root& root, const std::string& own) {
  std::vector<StepEntries> out;
  const std::string name = LastComponent(root.PathOf(own));
  const auto number = StepNumber(name);
  if (own.empty() || !number) return out;
  const std::string above = ParentPath(own);
  const auto beside = root.List(above);
  if (!beside && IsOutOfReach(beside.error())) return out;
  if (!beside) return Fail(Error(beside.error()));
  std::vector<std::pair<uint64_t, std::string>> earlier;
  for (const RootEntry& entry : *beside) {
    const auto other = StepNumber(entry.name);
    const bool before = entry.kind == EntryKind::kDirectory && entry.link.empty() && other &&
                        *other < *number && WithoutNumber(entry.name) == WithoutNumber(name);
    if (before) earlier.emplace_back(*other, entry.name);
  }
  std::ranges::sort(earlier, std::greater());
  for (const auto& [_, step] : earlier) {
    if (out.size() == kMaxEarlier) break;
    auto entries = ListStepEntries(root, JoinPath(above, step));
    if (!entries && !IsOutOfReach(entries.error())) return Fail(std::move(entries).error());
    if (entries) out.push_back(*std::move(entries));
  }
  return out;
}

// The same by the steps before it: the first that is whole says which tool saves here.
Result<StepTool> WritingByOthers(const Root& root, const std::string& own) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepEntries> earlier, EarlierSteps(root, own));
  for (const StepEntries& step : earlier) {
    if (HasRandomStates(step)) return StepTool::kAccelerate;
    if (step.HasFile(kTrainerState)) return StepTool::kTrainer;
  }
  return StepTool::kNone;
}

// ModelCheckpoint's own among Lightning's names; what else ends so may be somebody's dcp.save.
bool IsModelCheckpoints(std::string_view name) {
  return name.find("step=") != std::string_view::npos ||
         name.find("epoch=") != std::string_view::npos;
}

// Objects of the job's own, which accelerate saves after its random states.
struct Custom {
  std::vector<std::string> files;
  bool told = false;   // by a step before this one, how many there are
  bool lacks = false;  // some of these
};

Result<Custom> CustomObjectsOf(const StepCandidate& step, const std::string& own, const StepEntries& entries) {
  const auto is = [](const std::string& path) { return LastComponent(path).starts_with(kCustom); };
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepEntries> earlier, EarlierSteps(*step.root, own));
  Custom out;
  std::ranges::copy_if(entries.files, std::back_inserter(out.files), is);
  out.told = !earlier.empty() || step.before != nullptr;
  if (!out.told) return out;
  const auto before = earlier.empty() ? std::ranges::count_if(*step.before, is)
                                      : std::ranges::count_if(earlier.front().files, is);
  out.lacks = std::ssize(out.files) < before;
  return out;
}

// The tool whose last file is told by its name alone; kNone of Lightning, too.
StepTool SealingTool(const Root& root, const std::string& own, const StepEntries& entries) {
  const StepTool tool = ToolOf(LastComponent(root.PathOf(own)), entries);
  return tool == StepTool::kTrainer || tool == StepTool::kAccelerate ? tool : StepTool::kNone;
}

}  // namespace

Result<Seal> ToolSeal(const StepCandidate& step, const std::string& own) {
  const Root& root = *step.root;
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, own));
  const StepTool tool = SealingTool(root, own, entries);
  if (tool == StepTool::kNone) return Seal::kUnknown;
  std::vector<std::string> last = {JoinPath(own, LastOf(tool).file)};
  bool tells = true;
  if (tool == StepTool::kAccelerate) {
    CKPT_ASSIGN_OR_RETURN(const Custom custom, CustomObjectsOf(step, own, entries));
    if (custom.lacks) return Seal::kMissing;
    tells = custom.told;
    for (const std::string& name : custom.files) last.push_back(JoinPath(own, name));
  }
  int64_t end = 0;
  for (const std::string& path : last) {
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(root, path));
    if (!there) return Seal::kMissing;
    tells = tells && !step.growing.contains(path);
    end = std::max(end, there->stamp.mtime_ns);
  }
  // Other ranks may write theirs after it.
  return tells && end >= step.mtime_ns ? Seal::kThere : Seal::kUnknown;
}

Result<std::string> ToolLastFile(const StepCandidate& step, const std::string& own) {
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*step.root, own));
  const StepTool tool = SealingTool(*step.root, own, entries);
  return tool == StepTool::kNone ? std::string() : JoinPath(own, LastOf(tool).file);
}

Status CheckSealed(const StepCandidate& step, const SourceOptions& options) {
  if (options.weights_only) return {};
  const Root& root = *step.root;
  CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(root, step.Own()));
  if (!directory) return {};
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, step.Own()));
  const std::string name = LastComponent(root.PathOf(step.Own()));
  StepTool writing = StepTool::kNone;
  if (IsLightningName(name)) {
    const bool sharded = entries.HasFile(".metadata") && !entries.HasFile(kLightningMeta);
    if (sharded && IsModelCheckpoints(name)) writing = StepTool::kLightning;
  } else if (!entries.HasFile(kTrainerState) && !HasRandomStates(entries)) {
    writing = WritingByItself(name, entries);
    if (writing == StepTool::kNone) {
      CKPT_ASSIGN_OR_RETURN(writing, WritingByOthers(root, step.Own()));
    }
  }
  if (writing == StepTool::kNone) return {};
  const Last last = LastOf(writing);
  return Fail(ErrorCode::kInvalid,
              StrCat(root.PathOf(step.Own()), ": no ", last.file, ", which ", last.writer,
                     " writes last: the save was cut off (`adopt --weights-only` takes the weights)"));
}

}  // namespace ckptfs
