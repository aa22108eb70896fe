// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/placed.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/state_dict_names.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"

namespace ckptfs::deepspeed::universal {
namespace {

using Names = std::set<std::string_view>;

// The keys beside 'param' are evidence where the converted checkpoint was
// tensor-parallel; from a single rank every parameter has cat_dim 0.
std::optional<Pattern> PatternOf(const ModelStates& model, const Folder& folder) {
  const Marks& marks = folder.states.front().marks;
  const bool bare = folder.states.front().bare;
  const bool was_cut = model.tp_degree > 1 || (model.info && model.info->DeclaresTensorParallel());
  // The map knows more than marks, which say nothing of uneven cuts.
  if (model.info && model.info->affine.Find(folder.name) != nullptr) return std::nullopt;
  const bool specific = marks.parts > 0 || !marks.part_sizes.empty() || marks.vocabulary ||
                        marks.cat_dim.value_or(0) > 0;
  if (bare || !(was_cut || specific)) return std::nullopt;
  if (!marks.cat_dim) {
    const bool mapped = model.info && !model.info->affine.empty();
    return mapped ? std::nullopt : std::optional(Pattern::Replicate());
  }
  const uint32_t dim = *marks.cat_dim;
  if (dim >= folder.shape.size()) return std::nullopt;
  Pattern out = Pattern::Shard(dim, marks.part_sizes);
  if (marks.parts > 0 && folder.shape[dim] % marks.parts == 0) {
    out.cuts[0].parts.assign(marks.parts, folder.shape[dim] / marks.parts);
  }
  if (marks.vocabulary) out.cuts[0].pad_multiple = 1;
  return MakeLocal(out, folder.shape, 0, 1) ? std::optional(std::move(out)) : std::nullopt;
}

// Every folder has its master and states; weights are not stored.
void AddFolders(const Parsed& parsed, StateDict& dict) {
  for (const Folder& folder : parsed.folders) {
    StateDict::Tensor& added = dict.tensors.emplace_back();
    added.name = folder.name;
    added.shape = folder.shape;
    added.role = Role::kTrainable;
    added.pattern = PatternOf(parsed.model(), folder);
    added.expert = ExpertOf(folder.name);
    added.stacked_experts = folder.states.front().marks.experts;
    for (const State& state : folder.states) {
      StateDict::State& one =
          dict.states.emplace_back(StateDict::State{0, folder.name, state.kind});
      one.kinds = StateDict::Kinds::kOurs;
      if (state.scalar) {
        one.scalar = [&value = *state.scalar] { return std::optional(value); };
        continue;
      }
      one.dtype = state.tensor->dtype();
      one.shape = state.tensor->shape();
      one.place = PlaceTensor(*state.tensor);
      one.relation = *one.shape == folder.shape ? Relation::kSame : Relation::kReduced;
    }
  }
}

void AddOther(const ModelStates& model, std::string name, std::vector<const FileTensor*> tensors,
              StateDict& dict) {
  const bool buffer = std::any_of(
      model.buffers.begin(), model.buffers.end(),
      [&](const std::string& known) { return known == name || InStateDict(known) == name; });
  StateDict::Tensor& added = dict.tensors.emplace_back();
  added.name = std::move(name);
  added.dtype = tensors[0]->dtype();
  added.shape = tensors[0]->shape();
  added.role = buffer ? Role::kBuffer : Role::kFrozen;
  for (const FileTensor* tensor : tensors) added.ranks.push_back(tensor->shape());
  added.place = [tensors = std::move(tensors)](Assembler& assembler, AtomParts& atom) -> Status {
    for (uint32_t tp = 0; tp < tensors.size(); ++tp) {
      CKPT_RETURN_IF_ERROR(PlaceTensor(*tensors[tp], Holder{0, tp})(assembler, atom));
    }
    return {};
  };
}

// Buffers and frozen parameters lie in the copied model states files.
void AddOthers(const Parsed& parsed, StateDict& dict) {
  const ModelStates& first = parsed.model();
  const uint32_t tp = std::max<uint32_t>(1, std::min<uint32_t>(first.tp_degree, 1u << 16));
  StateDictNames spellings;
  std::set<std::string> known;
  for (const Folder& folder : parsed.folders) {
    spellings.Add(folder.name);
    known.insert(folder.name);
  }
  for (const auto& [alias, stored] : first.shared) {
    spellings.Add(alias);
    known.insert(alias);
  }
  for (const NamedTensor& entry : first.module) {
    std::string name = spellings.Of(entry.name);
    if (known.contains(name)) continue;
    std::vector<const FileTensor*> tensors;
    for (uint32_t rank = 0; rank < tp && parsed.models.contains(rank); ++rank) {
      for (const NamedTensor& other : parsed.models.at(rank).module) {
        if (other.name == entry.name) tensors.push_back(&other.tensor);
      }
    }
    if (tensors.size() != tp || tensors[0]->shape() == Shape{0}) continue;
    AddOther(first, std::move(name), std::move(tensors), dict);
  }
}

// Returns the optimizer's group that an entry of param_shapes is, if it is one.
std::optional<size_t> GroupOf(const OptimizerState& optimizer, size_t entry) {
  size_t out = entry;
  for (size_t k = 0; optimizer.by_sub_group && k < optimizer.groups.size(); ++k) {
    const auto& members = optimizer.groups[k].members;
    const bool member =
        std::find(members.begin(), members.end(), static_cast<int64_t>(entry)) != members.end();
    if (member) out = k;
  }
  return out < optimizer.groups.size() ? std::optional(out) : std::nullopt;
}

// False if nothing tells which of several groups a parameter is in.
Result<bool> AddGroups(const Listed& listed, const Parsed& parsed, const Names& folders,
                       StateDict& dict) {
  const OptimizerState& optimizer = parsed.optimizer;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    dict.groups.push_back({0, optimizer.groups[g].hyper_parameters, {}, g});
  }
  Names named;
  const auto add = [&](size_t group, std::string_view name) {
    if (!named.insert(name).second) return;
    dict.groups[group].members.push_back({std::string(name), std::nullopt});
  };
  for (const auto& [mp, model] : parsed.models) {
    for (size_t s = 0; s < model.groups.size(); ++s) {
      const auto group = GroupOf(optimizer, s);
      if (!group) continue;
      for (const NamedShape& entry : model.groups[s]) {
        if (!folders.contains(entry.name)) {
          return Refuse(model.file, ": param_shapes names '", entry.name, "', but there is no ",
                        listed.files.PathOf("zero/" + entry.name));
        }
        add(*group, entry.name);
      }
    }
  }
  const bool told = !named.empty() || optimizer.groups.size() < 2;
  if (named.empty() && optimizer.groups.size() == 1) {
    for (const std::string_view name : folders) add(0, name);
  }
  return told;
}

Status AddSteps(const Parsed& parsed, const Names& folders, StateDict& dict) {
  for (const auto& [sub_group, scalar] : parsed.optimizer.scalars) {
    for (const NamedShape& entry : parsed.model().groups[sub_group]) {
      if (!folders.contains(entry.name)) {
        return Refuse(parsed.optimizer.file, ": a state of '", entry.name,
                      "', which param_shapes names, but zero/ has no folder of it");
      }
      StateDict::State& added =
          dict.states.emplace_back(StateDict::State{0, entry.name, scalar.name});
      added.kinds = StateDict::Kinds::kOurs;
      added.scalar = [&value = scalar.value] { return std::optional(value); };
    }
  }
  return {};
}

std::optional<DType> ModelDType(const Parsed& parsed) {
  std::set<std::string> trained;
  for (const Folder& folder : parsed.folders) {
    trained.insert(folder.name);
    trained.insert(InStateDict(folder.name));
  }
  std::map<DType, uint64_t> counts;
  for (const NamedTensor& entry : parsed.model().module) {
    if (trained.contains(entry.name)) ++counts[entry.tensor.dtype()];
  }
  return MostCommon(counts, DTypeFromName(parsed.model().config_dtype));
}

// Frozen parameters that only the original checkpoint has: said, since every
// view of this step lacks them.
void NoteMissingFrozen(const Parsed& parsed, const Names& names, StepModel& header) {
  size_t missing = 0;
  std::string first;
  for (const NamedShape& entry : parsed.model().frozen) {
    if (names.contains(entry.name)) continue;
    if (missing++ == 0) first = entry.name;
  }
  if (missing == 0) return;
  header.notes.push_back(
      StrCat(missing, " frozen parameters (", first, missing > 1 ? ", ...) are" : ") are",
             " not stored in this directory; adopt the original checkpoint to have them"));
}

void FillHeader(const Listed& listed, const Parsed& parsed, const Names& folders,
                StepModel& header) {
  const ModelStates& model = parsed.model();
  header.framework = "deepspeed_universal";
  header.framework_version = model.ds_version;
  header.id = listed.files.step.id;
  header.iteration = model.global_steps;
  header.documents = model.documents;
  std::set<std::string> left_out;
  for (const auto& [mp, other] : parsed.models) {
    left_out.insert(other.left_out.begin(), other.left_out.end());
    if (mp == 0) continue;
    AddOtherDocuments(model.documents, other.documents, StrCat("mp", mp), header.documents);
  }
  const auto& more = parsed.optimizer.documents;
  header.documents.insert(header.documents.end(), more.begin(), more.end());
  header.notes.emplace_back("weights are not stored; they are shown as their masters cast");
  LeaveOutEntries(left_out, header);
  NoteMissingFrozen(parsed, folders, header);
}

}  // namespace

Result<StepModel> Place(const Listed& listed, const Parsed& parsed, Assembler assembler) {
  const ModelStates& model = parsed.model();
  const StepCandidate& step = listed.files.step;
  StepModel& header = assembler.header();
  Names folders;
  for (const Folder& folder : parsed.folders) folders.insert(folder.name);
  StateDict dict;
  dict.model_dtype = ModelDType(parsed);
  dict.optimizers.emplace_back();
  if (model.info) dict.cuts = &*model.info;
  CKPT_ASSIGN_OR_RETURN(dict.sizes, SizesOf(model.variables, listed.files.options, step));
  AddFolders(parsed, dict);
  AddOthers(parsed, dict);
  for (const auto& [alias, stored] : model.shared) {
    if (!folders.contains(alias)) dict.second_names.emplace_back(alias, stored);
  }
  dict.second_names.insert(dict.second_names.end(), listed.links.begin(), listed.links.end());
  CKPT_ASSIGN_OR_RETURN(const bool groups_told, AddGroups(listed, parsed, folders, dict));
  CKPT_RETURN_IF_ERROR(AddSteps(parsed, folders, dict));
  FillHeader(listed, parsed, folders, header);
  for (LeftOut& one : LeftOutSettings(parsed.optimizer.groups, "only deepspeed/ has it")) {
    LeaveOut(header, std::move(one));
  }
  CKPT_RETURN_IF_ERROR(Settle(dict, listed.files.options, assembler));
  if (!groups_told) {
    header.notes.emplace_back(
        "the directory does not record which optimizer group a parameter "
        "is in");
  }
  CKPT_RETURN_IF_ERROR(CarryModelFiles(assembler, RootBelow(step.root, step.save), step.Prefix()));
  CKPT_RETURN_IF_ERROR(CarryBeside(assembler, step, "latest_universal"));
  return std::move(assembler).Finish();
}

}  // namespace ckptfs::deepspeed::universal
