// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/placed.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/state_dict_names.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/sharding/placer.h"
#include "formats/tools/model_files.h"

namespace ckptfs::deepspeed::universal {
namespace {

using Names = std::map<std::string, ParameterIndex, std::less<>>;

// The keys beside 'param' are evidence where the converted checkpoint was
// tensor-parallel; from a single rank every parameter has cat_dim 0.
Pattern PatternOf(const ModelStates& model, const Folder& folder, const Pattern& by_rules) {
  const Marks& marks = folder.states.front().marks;
  const bool bare = folder.states.front().bare;
  const bool was_cut = model.tp_degree > 1 || (model.info && model.info->DeclaresTensorParallel());
  // The map knows more than marks, which say nothing of uneven cuts.
  if (model.info && model.info->affine.Find(folder.name) != nullptr) return by_rules;
  const bool specific = marks.parts > 0 || !marks.part_sizes.empty() || marks.vocabulary ||
                        marks.cat_dim.value_or(0) > 0;
  if (bare || by_rules.kind != PatternKind::kUnknown || !(was_cut || specific)) return by_rules;
  if (!marks.cat_dim)
    return model.info && !model.info->affine.empty() ? by_rules : Pattern::Replicate();
  const uint32_t dim = *marks.cat_dim;
  if (dim >= folder.shape.size()) return by_rules;
  Pattern out = Pattern::Shard(dim, marks.part_sizes);
  if (marks.parts > 0 && folder.shape[dim] % marks.parts == 0) {
    out.cuts[0].parts.assign(marks.parts, folder.shape[dim] / marks.parts);
  }
  if (marks.vocabulary) out.cuts[0].pad_multiple = 1;
  return MakeLocal(out, folder.shape, 0, 1) ? out : by_rules;
}

Status ShardFolders(const Listed& listed, const Parsed& parsed, Sharded& out) {
  for (const Folder& folder : parsed.folders) {
    CKPT_ASSIGN_OR_RETURN(auto sharding, out.rules.Resolve(folder.name, {&folder.shape, 1}, false));
    const uint32_t experts = folder.states.front().marks.experts;
    sharding->pattern = PatternOf(parsed.model(), folder, sharding->pattern);
    if (const auto expert = ExpertOf(folder.name)) {  // whatever the family calls it
      sharding->expert = expert->number;
      sharding->expert_at = expert->at;
    }
    // Views of native MoE join the experts of several ranks under the name of one;
    // which belongs to which rank is not in the file.
    if (sharding->expert && experts > 0) {
      Error error{ErrorCode::kUnsupported,
                  StrCat(listed.files.PathOf("zero/" + folder.name),
                         ": one tensor holds experts of several expert-parallel ranks")};
      error.parameter = folder.name;
      return Fail(std::move(error).Needing(
          "adopt the original checkpoint, or a view of it without ep in its layout"));
    }
    sharding->stacked_experts = std::max(sharding->stacked_experts, experts);
    out.folders.push_back(*std::move(sharding));
  }
  return {};
}

Status ShardOther(const ModelStates& model, std::string name,
                  std::vector<const FileTensor*> tensors, Sharded& out) {
  const bool buffer = std::any_of(
      model.buffers.begin(), model.buffers.end(),
      [&](const std::string& known) { return known == name || InStateDict(known) == name; });
  std::vector<Shape> locals;
  locals.reserve(tensors.size());
  for (const FileTensor* tensor : tensors) locals.push_back(tensor->shape());
  CKPT_ASSIGN_OR_RETURN(auto sharding, out.rules.Resolve(name, locals, buffer));
  if (!sharding && !buffer) {
    Error error{ErrorCode::kUnsupported,
                StrCat("nothing says how frozen '", name,
                       "' is spread over tensor-parallel ranks: ", out.rules.WhyOpen(name))};
    error.parameter = name;
    return Fail(std::move(error).Needing(
        "settle it with --family-set NAME=NUMBER, --replicated REGEX or a family file"));
  }
  if (!sharding) sharding = ReplicatedSharding(locals[0], static_cast<uint32_t>(locals.size()));
  sharding->source_pattern.reset();  // of a tp degree that this directory does not have
  out.others.push_back(Other{std::move(name), buffer ? Role::kBuffer : Role::kFrozen,
                             *std::move(sharding), std::move(tensors)});
  return {};
}

// Buffers and frozen parameters lie in the copied model states files.
Status ShardOthers(const Parsed& parsed, Sharded& out) {
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
    CKPT_RETURN_IF_ERROR(ShardOther(first, std::move(name), std::move(tensors), out));
  }
  return {};
}

Status PlaceFolder(const Folder& folder, const Sharding& sharding, std::optional<DType> dtype,
                   Placer& placer) {
  CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                        placer.Declare(folder.name, Role::kTrainable, sharding));
  for (const State& state : folder.states) {
    if (state.scalar) {
      CKPT_RETURN_IF_ERROR(placer.AddScalar(index, state.kind, *state.scalar));
    } else if (state.tensor->shape() == folder.shape) {
      CKPT_RETURN_IF_ERROR(placer.AddTensor(index, state.kind, *state.tensor));
    } else {
      CKPT_RETURN_IF_ERROR(placer.AddReduced(index, state.kind, *state.tensor));
    }
  }
  if (dtype) CKPT_RETURN_IF_ERROR(placer.DeriveWeight(index, *dtype));
  return {};
}

Status PlaceOther(const Other& other, Placer& placer) {
  CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                        placer.Declare(other.name, other.role, other.sharding));
  for (uint32_t rank = 0; rank < other.tensors.size(); ++rank) {
    CKPT_RETURN_IF_ERROR(placer.AddTensor(index, "weight", *other.tensors[rank], Holder{0, rank}));
  }
  return {};
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

Status PlaceGroups(const Listed& listed, const Parsed& parsed, const Names& folders, Placer& placer,
                   StepModel& header) {
  const OptimizerState& optimizer = parsed.optimizer;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    CKPT_RETURN_IF_ERROR(placer.AddToGroup(g, optimizer.groups[g].hyper_parameters, {}));
  }
  bool named = false;
  for (const auto& [mp, model] : parsed.models) {
    for (size_t s = 0; s < model.groups.size(); ++s) {
      const auto group = GroupOf(optimizer, s);
      if (!group) continue;
      for (const NamedShape& entry : model.groups[s]) {
        const auto found = folders.find(entry.name);
        if (found == folders.end()) {
          return Refuse(model.file, ": param_shapes names '", entry.name, "', but there is no ",
                        listed.files.PathOf("zero/" + entry.name));
        }
        named = true;
        CKPT_RETURN_IF_ERROR(placer.AddToGroup(*group, "", {&found->second, 1}));
      }
    }
  }
  if (!named && optimizer.groups.size() == 1) {
    for (const auto& [name, index] : folders) {
      CKPT_RETURN_IF_ERROR(placer.AddToGroup(0, "", {&index, 1}));
    }
  } else if (!named && optimizer.groups.size() > 1) {
    header.notes.emplace_back(
        "the directory does not record which optimizer group a parameter "
        "is in");
  }
  return placer.FinishGroups();
}

Status PlaceSteps(const Parsed& parsed, const Names& folders, Placer& placer) {
  for (const auto& [sub_group, scalar] : parsed.optimizer.scalars) {
    for (const NamedShape& entry : parsed.model().groups[sub_group]) {
      const auto found = folders.find(entry.name);
      if (found == folders.end()) {
        return Refuse(parsed.optimizer.file, ": a state of '", entry.name,
                      "', which param_shapes names, but zero/ has no folder of it");
      }
      CKPT_RETURN_IF_ERROR(placer.AddScalar(found->second, scalar.name, scalar.value));
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
                const ShardingRules& rules, StepModel& header) {
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
  rules.Describe(header);
}

}  // namespace

Result<Sharded> Shard(const Listed& listed, const Parsed& parsed) {
  const ModelStates& model = parsed.model();
  const SourceOptions& options = listed.files.options;
  std::vector<NamedLocals> shapes;
  for (const Folder& folder : parsed.folders) {
    shapes.emplace_back(folder.name, std::vector<Shape>{folder.shape});
  }
  CKPT_ASSIGN_OR_RETURN(const ModelSizes sizes,
                        SizesOf(model.variables, options, listed.files.step));
  CKPT_ASSIGN_OR_RETURN(
      ShardingRules rules,
      ShardingRules::Make(model.info ? &*model.info : nullptr, options, std::move(shapes), sizes));
  Sharded out{std::move(rules), {}, {}};
  CKPT_RETURN_IF_ERROR(ShardFolders(listed, parsed, out));
  CKPT_RETURN_IF_ERROR(ShardOthers(parsed, out));
  return out;
}

Result<StepModel> Place(const Listed& listed, const Parsed& parsed, const Sharded& sharded,
                        Assembler assembler) {
  StepModel& header = assembler.header();
  header.model_dtype = ModelDType(parsed);
  Placer placer(assembler);
  Names folders;
  for (uint32_t i = 0; i < parsed.folders.size(); ++i) {
    CKPT_RETURN_IF_ERROR(
        PlaceFolder(parsed.folders[i], sharded.folders[i], header.model_dtype, placer));
    folders.emplace(parsed.folders[i].name, ParameterIndex{i});
  }
  for (const Other& other : sharded.others) CKPT_RETURN_IF_ERROR(PlaceOther(other, placer));
  const auto add_alias = [&](const std::string& alias, const std::string& of) {
    const auto found = folders.find(of);
    if (found != folders.end()) assembler.AddAlias(alias, found->second);
  };
  for (const auto& [alias, stored] : parsed.model().shared) {
    if (!folders.contains(alias)) add_alias(alias, stored);
  }
  FillHeader(listed, parsed, folders, sharded.rules, header);
  CKPT_RETURN_IF_ERROR(PlaceGroups(listed, parsed, folders, placer, header));
  CKPT_RETURN_IF_ERROR(PlaceSteps(parsed, folders, placer));
  for (const auto& [alias, folder] : listed.links) add_alias(alias, folder);
  const StepCandidate& step = listed.files.step;
  CKPT_RETURN_IF_ERROR(CarryModelFiles(assembler, RootBelow(step.root, step.save), step.Prefix()));
  CKPT_RETURN_IF_ERROR(CarryBeside(assembler, step, "latest_universal"));
  return std::move(assembler).Finish();
}

}  // namespace ckptfs::deepspeed::universal
