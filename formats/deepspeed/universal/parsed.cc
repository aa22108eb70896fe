// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/parsed.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/document_keys.h"

namespace ckptfs::deepspeed::universal {
namespace {

constexpr std::string_view kSuffix = ".pt";
constexpr std::string_view kOptimizerState = "zero/optimizer_state.pt";

Result<Marks> ReadMarks(PickleRef dict) {
  Marks out;
  if (const PickleRef dim = dict["cat_dim"]) {
    const auto number = dim.Int();
    if (!number || *number < 0 || *number >= static_cast<int64_t>(kMaxDimensions)) {
      return Refuse("'cat_dim' is not a dim");
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
      return Refuse("'sub_param_shape' has no shape or partition_dim");
    }
    out.cat_dim = static_cast<uint32_t>(*dim);
    const PickleRef cut = shape.at(static_cast<size_t>(*dim));
    if (const auto sizes = cut.AsShape()) out.part_sizes = *sizes;
    if (const auto count = cut.Int(); count && *count > 0)
      out.parts = static_cast<uint64_t>(*count);
  }
  out.vocabulary = dict["vocab_tensor"].Bool().value_or(false);
  if (dict["is_expert_param"].Bool().value_or(false)) {
    out.experts = static_cast<uint32_t>(
        std::clamp<int64_t>(dict["ep_num_experts"].Int().value_or(0), 0, 1 << 20));
  }
  return out;
}

Result<State> ReadState(const TorchFile& file, BlobIndex blob, std::string_view name) {
  State out;
  name.remove_suffix(kSuffix.size());
  out.kind = name == "fp32" ? "master" : std::string(name);
  PickleRef value = file.root();
  out.bare = !value.IsDict();
  if (!out.bare) {
    auto marks = ReadMarks(value);
    if (!marks) return Fail(std::move(marks).error().WithContext(file.name()));
    out.marks = *std::move(marks);
    value = value["param"];
  }
  CKPT_ASSIGN_OR_RETURN(out.scalar, ScalarOf(value, file));
  const bool tensor_alike = !out.bare && value.Tensor() != nullptr;
  if (out.scalar && out.kind != "master" && !tensor_alike) return out;
  auto tensor = FileTensorOf(value, file, blob, "its value");
  if (!tensor) return Fail(std::move(tensor).error().WithContext(file.name()));
  out.tensor = *std::move(tensor);
  if (out.kind == "master") out.scalar.reset();
  if (out.tensor->shape().empty()) out.marks = {};  // a number is whole on every rank
  return out;
}

Result<std::vector<Folder>> ReadFolders(const Listed& listed) {
  std::map<std::pair<size_t, size_t>, std::string> names;  // folder, file in it
  for (size_t i = 0; i < listed.folders.size(); ++i) {
    const FolderFiles& folder = listed.folders[i];
    for (size_t k = 0; k < folder.files.size(); ++k) {
      names.emplace(std::pair(i, k), JoinPath(folder.path(), folder.files[k]));
    }
  }
  const auto read = [&](const TorchFile& file, BlobIndex blob, const auto& key) {
    return ReadState(file, blob, listed.folders[key.first].files[key.second]);
  };
  CKPT_ASSIGN_OR_RETURN(auto states, ReadEach(listed.files, names, read));
  std::vector<Folder> out;
  for (const FolderFiles& folder : listed.folders) out.push_back(Folder{folder.name, {}, {}});
  for (auto& [key, state] : states) out[key.first].states.push_back(std::move(state));
  return out;
}

Result<std::map<uint32_t, ModelStates>> ReadModels(const TagFiles& files) {
  std::map<uint32_t, std::string> names = files.names.model;
  for (const auto& [key, name] : files.names.stage3_model) {
    if (key.dp == 0) names.try_emplace(key.mp, name);
  }
  const auto read = [](const TorchFile& file, BlobIndex blob, uint32_t) {
    return ReadModelStates(file, blob, ModelStatesWanted{true, true});
  };
  CKPT_ASSIGN_OR_RETURN(auto models, ReadEach(files, names, read));
  if (models.contains(0)) return models;
  return Refuse(files.step.Path(), ": no model states of rank 0");
}

// The folder's shape is its master's.  Stage 3 wrote flat tensors: then it is what
// param_shapes says (`shape`, null without it).
Status GiveShape(const TagFiles& files, const ModelStates& model, const Shape* shape,
                 Folder& folder) {
  const std::string path = files.PathOf("zero/" + folder.name);
  const auto master = std::find_if(folder.states.begin(), folder.states.end(),
                                   [](const State& state) { return state.kind == "master"; });
  if (master == folder.states.end()) {
    return Refuse(path, ": no fp32.pt");
  }
  folder.shape = master->tensor->shape();
  if (master->bare) {
    if (shape == nullptr) {
      return Refuse(path, "/fp32.pt: a flat tensor, but ", model.file,
                    " does not have param_shapes, which would tell its shape");
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(*shape));
    if (elements != master->tensor->elements()) {
      return Refuse(path, "/fp32.pt: ", master->tensor->elements(), " elements, but ", model.file,
                    " says ", ShapeToString(*shape));
    }
    folder.shape = *shape;
  }
  return {};
}

// A state has its parameter's shape, flat or not, or can be reduced.
Status ShapeStates(const TagFiles& files, Folder& folder) {
  for (State& state : folder.states) {
    const std::string file = StrCat(files.PathOf("zero/" + folder.name), "/",
                                    state.kind == "master" ? "fp32" : state.kind, kSuffix);
    // A 0-d tensor is a number, or all of a 0-d parameter's state.
    if (state.scalar && state.tensor) {
      if (folder.shape.empty()) state.scalar.reset();
      if (!folder.shape.empty()) state.tensor.reset();
    }
    if (!state.tensor || state.tensor->shape() == folder.shape) continue;
    if (state.bare && state.tensor->shape().size() == 1) {
      auto whole = state.tensor->Reshaped(folder.shape);
      if (!whole) return Fail(std::move(whole).error().WithContext(file));
      state.tensor = *std::move(whole);
    } else if (!CanBeReduced(state.kind, state.tensor->shape(), folder.shape)) {
      return Refuse(file, ": shape ", ShapeToString(state.tensor->shape()),
                    ", but the parameter "
                    "has ",
                    ShapeToString(folder.shape));
    }
  }
  return {};
}

Status GiveShapes(const TagFiles& files, Parsed& out) {
  std::map<std::string_view, const Shape*> shapes;
  for (const auto& group : out.model().groups) {
    for (const NamedShape& entry : group) shapes.emplace(entry.name, &entry.shape);
  }
  for (Folder& folder : out.folders) {
    const auto known = shapes.find(folder.name);
    CKPT_RETURN_IF_ERROR(
        GiveShape(files, out.model(), known == shapes.end() ? nullptr : known->second, folder));
  }
  return {};
}

// A parameter of this shape on one rank can be `whole`: cut along one dim over
// at most `ranks`, or, of a vocabulary, padded.
bool CanBeOf(const Shape& local, const Shape& whole, uint64_t ranks, bool vocabulary) {
  if (local.size() != whole.size()) return false;
  size_t others = 0;
  for (size_t d = 0; d < local.size(); ++d) {
    if (local[d] == whole[d]) continue;
    ++others;
    const bool cut = whole[d] > local[d] && CeilDiv(whole[d], ranks) <= local[d];
    if (!cut && !(vocabulary && whole[d] < local[d])) return false;
  }
  return others < 2;
}

// param_shapes (of each rank's part) against what the folders hold.
Status CheckShapes(const TagFiles& files, const Parsed& parsed) {
  std::map<std::string_view, const Folder*> folders;
  for (const Folder& folder : parsed.folders) folders.emplace(folder.name, &folder);
  for (const auto& [mp, model] : parsed.models) {
    const uint64_t ranks =
        std::max<uint64_t>(1, model.tp_degree > 0 ? model.tp_degree : model.mp_world);
    for (const auto& group : model.groups) {
      for (const NamedShape& entry : group) {
        const auto found = folders.find(entry.name);
        if (found == folders.end()) continue;  // Place refuses it
        const Folder& folder = *found->second;
        const Marks& marks = folder.states.front().marks;
        if (marks.experts > 0 || CanBeOf(entry.shape, folder.shape, ranks, marks.vocabulary)) {
          continue;
        }
        return Refuse(files.PathOf("zero/" + folder.name), "/fp32.pt: shape ",
                      ShapeToString(folder.shape), ", but ", model.file, " says ",
                      ShapeToString(entry.shape), " of each rank's part");
      }
    }
  }
  return {};
}

// The stage-3 form has no step.pt: a sub-group's numbers are in the kept state.
Status ReadSteps(PickleRef states, size_t sub_groups, const TorchFile& file, OptimizerState& out) {
  for (size_t s = 0; states && s < sub_groups; ++s) {
    const PickleRef state = states.AtInt(static_cast<int64_t>(s));
    if (!state) continue;
    for (const auto& [key, value] : state.Items()) {
      CKPT_ASSIGN_OR_RETURN(auto scalar, ScalarOf(value, file));
      if (!scalar || !key.String()) continue;
      out.scalars.emplace_back(s, NamedScalar{std::string(*key.String()), *std::move(scalar)});
    }
  }
  return {};
}

Result<OptimizerState> ReadOptimizer(const TagFiles& files, size_t sub_groups) {
  CKPT_ASSIGN_OR_RETURN(const TorchFile file, files.Open(kOptimizerState));
  OptimizerState out;
  out.file = file.name();
  const PickleRef root = file.root();
  if (!root.IsDict()) return Refuse(file.name(), ": not a dict");
  const PickleRef stage3 = root["optimizer_state_dict"];
  out.by_sub_group = static_cast<bool>(root["fp32_flat_groups"]);
  const PickleRef groups = !out.by_sub_group && root["param_groups"] ? root["param_groups"]
                           : stage3                                  ? stage3["param_groups"]
                                                                     : PickleRef();
  CopyBudget budget(file.tree());
  auto hyper = ReadHyperGroups(groups, file, budget);
  if (!hyper) return Fail(std::move(hyper).error().WithContext(file.name()));
  out.groups = *std::move(hyper);
  if (out.by_sub_group && stage3) {
    CKPT_RETURN_IF_ERROR(ReadSteps(stage3["state"], sub_groups, file, out));
  }
  for (const auto& [key, value] : root.Items()) {
    const std::string_view text = key.String().value_or("");
    const bool scalar = text == "loss_scaler" || text == "dynamic_loss_scale" ||
                        text == "overflow" || text == "clip_grad" || text == "zero_stage";
    if (!scalar) continue;
    CKPT_ASSIGN_OR_RETURN(Document document, DocumentOf(StrCat(kZeroPrefix, text), "", value, file,
                                                        files.BlobOf(kOptimizerState)));
    out.documents.push_back(std::move(document));
  }
  return out;
}

}  // namespace

Result<Listed> List(const StepCandidate& step, const SourceOptions& options, StepFiles names,
                    Assembler& assembler) {
  const std::string zero = JoinPath(step.directory, "zero");
  CKPT_ASSIGN_OR_RETURN(const auto entries, step.root->List(zero));
  std::vector<FolderFiles> folders;
  std::map<std::string, std::string> links;
  std::vector<std::string> order{std::string(kOptimizerState)};
  for (const std::string& name : NamesInOrder(names)) order.push_back(name);
  for (const auto& [name, kind, link] : entries) {
    // Only links to a folder beside them count, as other names of it.
    if (!link.empty() && link.find('/') == std::string::npos) links.emplace(name, link);
    if (kind != EntryKind::kDirectory || !link.empty()) continue;
    FolderFiles folder{name, {}};
    CKPT_ASSIGN_OR_RETURN(const auto files, step.root->List(JoinPath(zero, name)));
    for (const RootEntry& file : files) {
      const bool state = file.name.ends_with(kSuffix) && file.name.size() > kSuffix.size();
      const bool directory = file.kind == EntryKind::kDirectory && file.link.empty();
      if (!state || directory) continue;
      order.push_back(JoinPath(folder.path(), file.name));
      folder.files.push_back(file.name);
    }
    folders.push_back(std::move(folder));
  }
  if (folders.empty()) {
    return Refuse(step.root->PathOf(zero), ": no folder of a parameter");
  }
  CKPT_ASSIGN_OR_RETURN(TagFiles files,
                        Register(step, options, std::move(names), order, assembler));
  return Listed{std::move(files), std::move(folders), std::move(links)};
}

Result<Parsed> Parse(const Listed& listed) {
  const TagFiles& files = listed.files;
  Parsed out;
  CKPT_ASSIGN_OR_RETURN(out.models, ReadModels(files));
  CKPT_ASSIGN_OR_RETURN(out.folders, ReadFolders(listed));
  CKPT_RETURN_IF_ERROR(GiveShapes(files, out));
  CKPT_RETURN_IF_ERROR(CheckShapes(files, out));
  for (Folder& folder : out.folders) CKPT_RETURN_IF_ERROR(ShapeStates(files, folder));
  CKPT_ASSIGN_OR_RETURN(out.optimizer, ReadOptimizer(files, out.model().groups.size()));
  return out;
}

}  // namespace ckptfs::deepspeed::universal
