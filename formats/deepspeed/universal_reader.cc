// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal_reader.h"

#include <algorithm>
#include <set>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/ingest/model_config.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/model_files/model_files.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kSuffix = ".pt";

std::string KindOf(std::string_view file) {
  file.remove_suffix(kSuffix.size());
  return file == "fp32" ? "master" : std::string(file);
}

}  // namespace

UniversalReader::UniversalReader(const StepCandidate& candidate, const SourceOptions& options,
                                 StepFiles files)
    : candidate_(candidate), options_(options), files_(std::move(files)) {
  prefix_ = candidate_.Prefix();
}

std::string UniversalReader::PathOf(std::string_view name) const {
  return candidate_.root->PathOf(JoinPath(candidate_.directory, name));
}

Result<TorchFile> UniversalReader::OpenFile(const std::string& name) {
  CKPT_ASSIGN_OR_RETURN(auto opened, candidate_.root->Open(JoinPath(candidate_.directory, name)));
  CKPT_ASSIGN_OR_RETURN(TorchFile file, TorchFile::Open(std::move(opened)));
  CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
  assembler_.SetFrame(blobs_.at(name), frame);
  return file;
}

Status UniversalReader::ListFolders() {
  const std::string zero = JoinPath(candidate_.directory, "zero");
  CKPT_ASSIGN_OR_RETURN(const auto entries, candidate_.root->List(zero));
  for (const auto& [name, kind, link] : entries) {
    // Of links only those to a folder beside them count, as other names of it.
    if (!link.empty() && link.find('/') == std::string::npos) links_.emplace(name, link);
    if (kind != EntryKind::kDirectory || !link.empty()) continue;
    Folder folder;
    folder.name = name;
    CKPT_ASSIGN_OR_RETURN(const auto files, candidate_.root->List(JoinPath(zero, name)));
    for (const RootEntry& file : files) {
      const bool state = file.name.ends_with(kSuffix) && file.name.size() > kSuffix.size();
      const bool directory = file.kind == EntryKind::kDirectory && file.link.empty();
      if (state && !directory) folder.files.push_back(file.name);
    }
    folders_.push_back(std::move(folder));
  }
  if (folders_.empty()) {
    return Fail(ErrorCode::kInvalid, StrCat(PathOf("zero"), ": no folder of a parameter"));
  }
  return {};
}

Status UniversalReader::RegisterFiles() {
  const uint32_t root = assembler_.AddRoot(RootBelow(candidate_.root, candidate_.save));
  std::vector<std::string> names{"zero/optimizer_state.pt"};
  for (const auto& [key, name] : files_.model) names.push_back(name);
  for (const auto& [key, name] : files_.stage3_model) names.push_back(name);
  for (const std::string& name : files_.others) names.push_back(name);
  for (const Folder& folder : folders_) {
    for (const std::string& file : folder.files) {
      names.push_back(StrCat("zero/", folder.name, "/", file));
    }
  }
  for (const std::string& name : names) {
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, prefix_ + name));
    blobs_.emplace(name, blob);
  }
  return {};
}

Status UniversalReader::ReadModels() {
  std::map<uint32_t, std::string> names = files_.model;
  for (const auto& [key, name] : files_.stage3_model) {
    if (key.dp == 0) names.try_emplace(key.mp, name);
  }
  for (const auto& [mp, name] : names) {
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, OpenFile(name));
    CKPT_ASSIGN_OR_RETURN(
        ModelStates states,
        ReadModelStates(file, blobs_.at(name), ModelStatesWanted{true, true}));
    models_.emplace(mp, std::move(states));
  }
  if (models_.count(0) == 0) {
    return Fail(ErrorCode::kInvalid, StrCat(candidate_.Path(), ": no model states of rank 0"));
  }
  return {};
}

Result<UniversalReader::Marks> UniversalReader::ReadMarks(PickleRef dict) {
  Marks out;
  if (const PickleRef dim = dict["cat_dim"]) {
    const auto number = dim.Int();
    if (!number || *number < 0 || *number >= static_cast<int64_t>(kMaxDimensions)) {
      return Fail(ErrorCode::kInvalid, "'cat_dim' is no dim");
    }
    out.cat_dim = static_cast<uint32_t>(*number);
  }
  if (const auto parts = dict["param_n_sub_params"].Int(); parts && *parts > 0) {
    out.parts = static_cast<uint64_t>(*parts);
  }
  if (const PickleRef sub = dict["sub_param_shape"]; sub && !sub.IsNone()) {
    const PickleRef shape = sub["shape"];
    const auto dim = sub["partition_dim"].Int();
    if (!shape || !dim || *dim < 0 || static_cast<size_t>(*dim) >= shape.size()) {
      return Fail(ErrorCode::kInvalid, "'sub_param_shape' has no shape or partition_dim");
    }
    out.cat_dim = static_cast<uint32_t>(*dim);
    const PickleRef cut = shape.at(static_cast<size_t>(*dim));
    if (const auto sizes = cut.AsShape()) out.part_sizes = *sizes;
    if (const auto count = cut.Int(); count && *count > 0) out.parts = static_cast<uint64_t>(*count);
  }
  out.vocabulary = dict["vocab_tensor"].Bool().value_or(false);
  if (dict["is_expert_param"].Bool().value_or(false)) {
    out.experts = static_cast<uint32_t>(
        std::clamp<int64_t>(dict["ep_num_experts"].Int().value_or(0), 0, 1 << 20));
  }
  return out;
}

Result<UniversalReader::State> UniversalReader::ReadState(const Folder& folder,
                                                          const std::string& file) {
  const std::string relative = StrCat("zero/", folder.name, "/", file);
  CKPT_ASSIGN_OR_RETURN(const TorchFile torch, OpenFile(relative));
  State out;
  out.kind = KindOf(file);
  PickleRef value = torch.root();
  if (value.IsDict()) {
    auto marks = ReadMarks(value);
    if (!marks) return Fail(std::move(marks).error().WithContext(torch.name()));
    out.marks = *std::move(marks);
    value = value["param"];
  } else {
    out.bare = true;
  }
  CKPT_ASSIGN_OR_RETURN(out.scalar, ScalarOf(value, torch));
  if (out.scalar && out.kind != "master") return out;
  out.scalar.reset();
  auto tensor = FileTensorOf(value, torch, blobs_.at(relative), "its value");
  if (!tensor) return Fail(std::move(tensor).error().WithContext(torch.name()));
  out.tensor = *std::move(tensor);
  return out;
}

Status UniversalReader::ReadFolder(Folder& folder) {
  for (const std::string& file : folder.files) {
    CKPT_ASSIGN_OR_RETURN(State state, ReadState(folder, file));
    folder.states.push_back(std::move(state));
  }
  return {};
}

// The keys beside 'param' are evidence where the converted checkpoint was
// tensor-parallel; from a single rank every parameter has cat_dim 0.
Pattern UniversalReader::PatternOf(const Folder& folder, const Pattern& by_rules) const {
  const Marks& marks = folder.states.front().marks;
  const bool bare = folder.states.front().bare;
  const ModelStates& model = models_.at(0);
  const bool was_cut = model.tp_degree > 1 || (model.info && model.info->DeclaresTensorParallel());
  // The map knows more than marks, which say nothing of uneven cuts.
  if (model.info && model.info->affine.Find(folder.name) != nullptr) return by_rules;
  const bool specific = marks.parts > 0 || !marks.part_sizes.empty() || marks.vocabulary ||
                        marks.cat_dim.value_or(0) > 0;
  if (bare || by_rules.kind != PatternKind::kUnknown || !(was_cut || specific)) return by_rules;
  if (!marks.cat_dim) return model.info && !model.info->affine.empty() ? by_rules
                                                                       : Pattern::Replicate();
  const uint32_t dim = *marks.cat_dim;
  if (dim >= folder.shape.size()) return by_rules;
  Pattern out = Pattern::Shard(dim, marks.part_sizes);
  if (marks.parts > 0 && folder.shape[dim] % marks.parts == 0) {
    out.cuts[0].parts.assign(marks.parts, folder.shape[dim] / marks.parts);
  }
  if (marks.vocabulary) out.cuts[0].pad_multiple = 1;
  return MakeLocal(out, folder.shape, 0, 1) ? out : by_rules;
}

Status UniversalReader::PlaceFolder(const Folder& folder, ParameterIndex index) {
  std::optional<AtomIndex> master;
  const auto file_of = [&](const State& state) {
    return PathOf(StrCat("zero/", folder.name, "/", state.kind == "master" ? "fp32" : state.kind, kSuffix));
  };
  for (const State& state : folder.states) {
    if (state.scalar) {
      CKPT_ASSIGN_OR_RETURN(
          const AtomIndex atom,
          assembler_.AddAtom(index, "", state.kind, state.scalar->dtype, state.scalar->shape,
                             Relation::kScalar));
      CKPT_RETURN_IF_ERROR(
          assembler_.SetInline(atom, state.scalar->bytes, state.scalar->python_number));
      continue;
    }
    FileTensor tensor = *state.tensor;
    Relation relation = Relation::kSame;
    if (tensor.shape() != folder.shape && state.bare && tensor.shape().size() == 1) {
      auto flat = tensor.Reshaped(folder.shape);
      if (!flat) return Fail(std::move(flat).error().WithContext(file_of(state)));
      tensor = *std::move(flat);
    }
    if (tensor.shape() != folder.shape) {
      if (!CanBeReduced(state.kind, tensor.shape(), folder.shape)) {
        return Fail(ErrorCode::kInvalid,
                    StrCat(file_of(state), ": shape ", ShapeToString(tensor.shape()),
                           ", the parameter ", ShapeToString(folder.shape)));
      }
      relation = Relation::kReduced;
    }
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(index, "", state.kind, tensor.dtype(), tensor.shape(),
                                             relation));
    CKPT_RETURN_IF_ERROR(PlaceTensor(atom, 0, WholeTensor(tensor.shape()), tensor));
    if (state.kind == "master") master = atom;
  }
  const std::optional<DType> dtype = assembler_.header().model_dtype;
  if (master && dtype) {
    CKPT_ASSIGN_OR_RETURN(const AtomIndex weight,
                          assembler_.AddAtom(index, "", "weight", *dtype, folder.shape));
    CKPT_RETURN_IF_ERROR(assembler_.SetCast(weight, *master));
  }
  return {};
}

// Views of native MoE join the experts of several ranks under the name of one;
// which belongs to which rank is not in the file.
Status UniversalReader::CheckExperts(const Folder& folder, const Parameter& parameter) const {
  if (!parameter.expert || folder.states.front().marks.experts == 0) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat(PathOf(StrCat("zero/", folder.name)), ": experts of several expert-parallel "
                     "ranks in one tensor; adopt the original checkpoint, or a view of it without "
                     "ep in its layout"));
}

// Frozen parameters that only the original checkpoint has: said, since every
// view of this step lacks them.
void UniversalReader::NoteMissingFrozen() {
  size_t missing = 0;
  std::string first;
  for (const NamedShape& entry : models_.at(0).frozen) {
    if (parameters_.count(entry.name) > 0) continue;
    if (missing++ == 0) first = entry.name;
  }
  if (missing == 0) return;
  assembler_.header().notes.push_back(
      StrCat(missing, " frozen parameters (", first, missing > 1 ? ", ...) are" : ") are",
             " not stored in this directory; adopt the original checkpoint to have them"));
}

Status UniversalReader::DeclareParameters() {
  const ModelStates& model = models_.at(0);
  std::vector<NamedLocals> shapes;
  for (const Folder& folder : folders_) shapes.emplace_back(folder.name, std::vector<Shape>{folder.shape});
  CKPT_ASSIGN_OR_RETURN(ModelSizes sizes,
                        SizesOf(model.variables, options_.variables, candidate_));
  CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                        ShardingRules::Make(model.info ? &*model.info : nullptr, options_,
                                            std::move(shapes), std::move(sizes)));
  FillHeader();
  for (const Folder& folder : folders_) {
    const std::string& name = folder.name;
    spellings_.Add(name);
    CKPT_ASSIGN_OR_RETURN(const auto sharding, rules.Resolve(name, {&folder.shape, 1}, false));
    Parameter parameter;
    parameter.name = name;
    parameter.shape = folder.shape;
    parameter.pattern = PatternOf(folder, sharding->pattern);
    parameter.stage = sharding->stage;
    parameter.layer = sharding->layer.value_or(0);
    parameter.expert = sharding->expert;
    parameter.expert_at = sharding->expert_at;
    if (const auto expert = ExpertOf(name)) {  // whatever the family calls it
      parameter.expert = expert->number;
      parameter.expert_at = expert->at;
    }
    CKPT_RETURN_IF_ERROR(CheckExperts(folder, parameter));
    parameter.stacked_experts =
        std::max(sharding->stacked_experts, folder.states.front().marks.experts);
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                          assembler_.AddParameter(std::move(parameter)));
    parameters_.emplace(name, index);
    CKPT_RETURN_IF_ERROR(PlaceFolder(folder, index));
  }
  CKPT_RETURN_IF_ERROR(DeclareOthers(rules));
  std::set<std::string> left_out;
  for (const auto& [mp, other] : models_) left_out.insert(other.left_out.begin(), other.left_out.end());
  AddLeftOutNote(left_out, assembler_.header());
  NoteMissingFrozen();
  rules.Describe(assembler_.header());
  return {};
}

// Buffers and frozen parameters lie in the copied model states files.
Status UniversalReader::DeclareOthers(const ShardingRules& rules) {
  const ModelStates& first = models_.at(0);
  const uint32_t tp = std::max<uint32_t>(1, std::min<uint32_t>(first.tp_degree, 1u << 16));
  std::map<std::string, std::string> shared;
  for (const auto& [alias, stored] : first.shared) {
    shared.emplace(alias, stored);
    spellings_.Add(alias);
  }
  for (const NamedTensor& entry : first.module) {
    const std::string name = spellings_.Of(entry.name);
    if (parameters_.count(name) > 0 || shared.count(name) > 0) continue;
    std::vector<const FileTensor*> tensors;
    for (uint32_t rank = 0; rank < tp && models_.count(rank) > 0; ++rank) {
      for (const NamedTensor& other : models_.at(rank).module) {
        if (other.name == entry.name) tensors.push_back(&other.tensor);
      }
    }
    if (tensors.size() != tp || tensors[0]->shape() == Shape{0}) continue;
    CKPT_RETURN_IF_ERROR(DeclareOther(rules, name, tensors));
  }
  for (const auto& [alias, stored] : shared) {
    const auto found = parameters_.find(stored);
    if (found != parameters_.end() && parameters_.count(alias) == 0) {
      assembler_.AddAlias(alias, found->second);
    }
  }
  return {};
}

Status UniversalReader::DeclareOther(const ShardingRules& rules, const std::string& name,
                                     const std::vector<const FileTensor*>& tensors) {
  const auto& buffers = models_.at(0).buffers;
  const bool buffer = std::any_of(buffers.begin(), buffers.end(), [&](const std::string& known) {
    return known == name || InStateDict(known) == name;
  });
  std::vector<Shape> locals;
  locals.reserve(tensors.size());
  for (const FileTensor* tensor : tensors) locals.push_back(tensor->shape());
  CKPT_ASSIGN_OR_RETURN(auto sharding, rules.Resolve(name, locals, buffer));
  if (!sharding && !buffer) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("nothing says how frozen '", name, "' is spread over tensor-parallel ranks: ",
                       rules.WhyOpen(name), "; settle it with --family-set NAME=NUMBER, "
                       "--replicated REGEX or a family file"));
  }
  if (!sharding) {
    sharding = Sharding{};
    sharding->how = Sharding::How::kReplicas;
    sharding->pattern = Pattern::Replicate();
    sharding->shape = locals[0];
    sharding->locals.assign(locals.size(), WholeTensor(locals[0]));
  }
  Parameter parameter;
  parameter.name = name;
  parameter.shape = sharding->shape;
  parameter.role = buffer ? Role::kBuffer : Role::kFrozen;
  parameter.pattern = sharding->pattern;
  parameter.stage = sharding->stage;
  parameter.layer = sharding->layer.value_or(0);
  CKPT_ASSIGN_OR_RETURN(const ParameterIndex index, assembler_.AddParameter(std::move(parameter)));
  CKPT_ASSIGN_OR_RETURN(const AtomIndex atom, assembler_.AddAtom(index, "", "weight",
                                                                 tensors[0]->dtype(), sharding->shape));
  if (sharding->how == Sharding::How::kAverage) assembler_.DeclareAverage(atom);
  if (sharding->how == Sharding::How::kReplicas) assembler_.DeclareReplicas(atom);
  for (uint32_t rank = 0; rank < tensors.size(); ++rank) {
    const uint32_t copy = sharding->how == Sharding::How::kCut ? 0 : rank;
    CKPT_RETURN_IF_ERROR(PlaceTensor(atom, copy, sharding->locals[rank], *tensors[rank]));
  }
  return {};
}

Status UniversalReader::PlaceTensor(AtomIndex atom, uint32_t copy, const LocalTensor& local,
                                    const FileTensor& tensor) {
  auto held = tensor.As(local);
  if (!held) return Fail(std::move(held).error().WithContext(assembler_.blob(tensor.blob()).path));
  const uint32_t at = assembler_.AddLocal(atom, copy, std::move(held->local));
  assembler_.AddFragment(atom, copy, at, held->fragment);
  return {};
}

Status UniversalReader::AddGroups(const std::vector<HyperGroup>& groups, bool by_sub_group) {
  std::vector<std::set<std::string>> added(groups.size());
  std::vector<Group> out(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) out[g].hyper_parameters = groups[g].hyper_parameters;
  bool named = false;
  for (const auto& [mp, model] : models_) {
    for (size_t s = 0; s < model.groups.size(); ++s) {
      size_t g = s;
      for (size_t k = 0; by_sub_group && k < groups.size(); ++k) {
        const auto& members = groups[k].members;
        if (std::find(members.begin(), members.end(), static_cast<int64_t>(s)) != members.end()) g = k;
      }
      if (g >= groups.size()) continue;
      for (const NamedShape& entry : model.groups[s]) {
        const auto found = parameters_.find(entry.name);
        if (found == parameters_.end()) {
          return Fail(ErrorCode::kInvalid,
                      StrCat(model.file, ": param_shapes names '", entry.name, "', and there is no ",
                             PathOf(StrCat("zero/", entry.name))));
        }
        named = true;
        if (added[g].insert(found->first).second) out[g].parameters.push_back(found->second);
      }
    }
  }
  if (!named && out.size() == 1) {
    for (const auto& [name, index] : parameters_) out[0].parameters.push_back(index);
  } else if (!named && out.size() > 1) {
    assembler_.header().notes.push_back("which parameter is in which optimizer group is not recorded");
  }
  for (Group& group : out) assembler_.AddGroup(std::move(group));
  return {};
}

// The stage-3 form has no step.pt: a sub-group's numbers are in the kept state.
Status UniversalReader::AddSteps(PickleRef states, const TorchFile& file) {
  const std::vector<std::vector<NamedShape>>& groups = models_.at(0).groups;
  for (size_t s = 0; states && s < groups.size(); ++s) {
    const PickleRef state = states.AtInt(static_cast<int64_t>(s));
    for (const auto& [key, value] : state ? state.Items()
                                          : std::vector<std::pair<PickleRef, PickleRef>>()) {
      CKPT_ASSIGN_OR_RETURN(const auto scalar, ScalarOf(value, file));
      if (!scalar || !key.String()) continue;
      for (const NamedShape& entry : groups[s]) {
        const auto parameter = parameters_.find(entry.name);
        if (parameter == parameters_.end()) {
          return Fail(ErrorCode::kInvalid,
                      StrCat(file.name(), ": a state of '", entry.name,
                             "', which param_shapes names and zero/ has no folder of"));
        }
        CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                              assembler_.AddAtom(parameter->second, "", *key.String(),
                                                 scalar->dtype, scalar->shape, Relation::kScalar));
        CKPT_RETURN_IF_ERROR(assembler_.SetInline(atom, scalar->bytes, scalar->python_number));
      }
    }
  }
  return {};
}

Status UniversalReader::ReadOptimizerState() {
  const std::string name = "zero/optimizer_state.pt";
  CKPT_ASSIGN_OR_RETURN(const TorchFile file, OpenFile(name));
  const PickleRef root = file.root();
  if (!root.IsDict()) return Fail(ErrorCode::kInvalid, StrCat(file.name(), ": not a dict"));
  const PickleRef stage3 = root["optimizer_state_dict"];
  const bool flat = static_cast<bool>(root["fp32_flat_groups"]);
  const PickleRef groups = !flat && root["param_groups"] ? root["param_groups"]
                           : stage3                      ? stage3["param_groups"]
                                                         : PickleRef();
  auto hyper = ReadHyperGroups(groups);
  if (!hyper) return Fail(std::move(hyper).error().WithContext(file.name()));
  CKPT_RETURN_IF_ERROR(AddGroups(*hyper, flat));
  if (flat && stage3) CKPT_RETURN_IF_ERROR(AddSteps(stage3["state"], file));
  for (const auto& [key, value] : root.Items()) {
    const std::string_view text = key.String().value_or("");
    const bool scalar = text == "loss_scaler" || text == "dynamic_loss_scale" || text == "overflow" ||
                        text == "clip_grad" || text == "zero_stage";
    if (!scalar) continue;
    CKPT_ASSIGN_OR_RETURN(Document document, DocumentOf(StrCat(kZeroPrefix, text), "", value, file,
                                                        blobs_.at(name)));
    assembler_.header().documents.push_back(std::move(document));
  }
  return {};
}

void UniversalReader::FillHeader() {
  const ModelStates& model = models_.at(0);
  StepModel& header = assembler_.header();
  header.framework = "deepspeed_universal";
  header.framework_version = model.ds_version;
  header.id = candidate_.id;
  header.iteration = model.global_steps;
  std::map<DType, int> dtypes;
  for (const NamedTensor& entry : model.module) {
    if (std::any_of(folders_.begin(), folders_.end(),
                    [&](const Folder& folder) {
                      return folder.name == entry.name || InStateDict(folder.name) == entry.name;
                    })) {
      ++dtypes[entry.tensor.dtype()];
    }
  }
  header.model_dtype = DTypeFromName(model.config_dtype);
  int most = 0;
  for (const auto& [dtype, count] : dtypes) {
    if (count > most) header.model_dtype = dtype;
    most = std::max(most, count);
  }
  header.documents = model.documents;
  for (const auto& [mp, other] : models_) {
    for (const Document& document : mp == 0 ? std::vector<Document>() : other.documents) {
      const Document* known = nullptr;
      for (const Document& own : model.documents) {
        if (own.key == document.key) known = &own;
      }
      if (known != nullptr && known->pickle == document.pickle && known->tensors.empty()) continue;
      header.documents.push_back(document);
      header.documents.back().scope = StrCat("mp", mp);
    }
  }
  header.notes.emplace_back("weights are not stored; they are shown as their masters cast");
}

Result<StepModel> UniversalReader::Read() && {
  CKPT_RETURN_IF_ERROR(ListFolders());
  CKPT_RETURN_IF_ERROR(RegisterFiles());
  CKPT_RETURN_IF_ERROR(ReadModels());
  std::vector<Status> outcomes(folders_.size());
  ParallelFor(folders_.size(), [&](size_t i) { outcomes[i] = ReadFolder(folders_[i]); });
  for (Status& outcome : outcomes) CKPT_RETURN_IF_ERROR(std::move(outcome));
  CKPT_RETURN_IF_ERROR(GiveShapes());
  CKPT_RETURN_IF_ERROR(CheckShapes());
  CKPT_RETURN_IF_ERROR(DeclareParameters());
  CKPT_RETURN_IF_ERROR(ReadOptimizerState());
  for (const auto& [alias, target] : links_) {
    const auto found = parameters_.find(target);
    if (found != parameters_.end()) assembler_.AddAlias(alias, found->second);
  }
  CKPT_RETURN_IF_ERROR(
      CarryModelFiles(assembler_, RootBelow(candidate_.root, candidate_.save), prefix_));
  return std::move(assembler_).Finish();
}

}  // namespace ckptfs::deepspeed
