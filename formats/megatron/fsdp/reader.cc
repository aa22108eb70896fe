// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/fsdp/reader.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_config.h"
#include "formats/dcp/beside.h"
#include "formats/megatron/fsdp/keys.h"
#include "formats/megatron/job/job_state.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::megatron {
namespace {

using dcp::KeyedEntry;

constexpr std::string_view kMaster = "master";
constexpr std::string_view kOurKinds[] = {"weight", kMaster};
// Ranks each saved their own.
constexpr std::string_view kOfRanks[] = {"rng_state", "rerun_state_machine"};

std::string_view FirstWord(std::string_view key) { return key.substr(0, key.find('.')); }

// The dtype that the job computes in; nothing for fp32.
std::optional<DType> ComputedOf(const CommonState& common) {
  if (common.Flag("bf16")) return DType::kBF16;
  if (common.Flag("fp16")) return DType::kF16;
  return std::nullopt;
}

bool IsPlainFloat(DType dtype) {
  constexpr std::array kPlain = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
  return std::ranges::find(kPlain, dtype) != kPlain.end();
}

}  // namespace

Result<std::optional<CommonState>> ArgumentsOf(dcp::StoredState& state) {
  const auto& all = state.metadata().objects;
  const auto found = std::ranges::find(all, kArguments, &dcp::ObjectEntry::name);
  if (found == all.end()) return std::optional<CommonState>();
  CKPT_ASSIGN_OR_RETURN(auto object, state.OpenObject(static_cast<size_t>(found - all.begin())));
  CKPT_ASSIGN_OR_RETURN(CommonState common,
                        CommonState::OfArguments(std::move(object.file), object.blob));
  return std::optional(std::move(common));
}

Result<StepModel> FsdpReader::Read() && {
  if (!options_.model.empty()) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(candidate_.Path(), ": --model: a directory of Megatron-FSDP has one model"));
  }
  dcp::BesideTensors beside(state_, assembler_, parameters_);
  dcp::ObjectReader objects(state_, beside);
  const auto work = [&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(common_, ArgumentsOf(state_));
    FsdpJob job = FsdpJobOf(state_.metadata()).value_or(FsdpJob());
    if (common_) {
      CKPT_ASSIGN_OR_RETURN(job, FsdpJobOf(*common_));
    }
    CKPT_ASSIGN_OR_RETURN(tensors_, FsdpTensorsOf(state_.metadata(), job));
    FindParts();
    CKPT_RETURN_IF_ERROR(AddWeights());
    if (!options_.weights_only) {
      dict_.optimizers.push_back({.label = "", .what = "the optimizer", .shown = ""});
      AddStates(objects);
      CKPT_RETURN_IF_ERROR(AddGroups(objects));
    }
    const FamilyVariables arguments = common_ ? common_->Arguments() : FamilyVariables();
    CKPT_ASSIGN_OR_RETURN(dict_.sizes, SizesOf(arguments, options_, candidate_));
    dict_.sizes.recorded.erase("vocab");  // not the tokenizer's, whose last ids it may lack
    dict_.sizes.recorded.erase("vocab_size");
    CKPT_ASSIGN_OR_RETURN(const Settled settled, Settle(dict_, options_, assembler_));
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      parameters_.emplace(dict_.tensors[i].name, ParameterIndex{static_cast<uint32_t>(i)});
    }
    CKPT_RETURN_IF_ERROR(AddDocuments(objects));
    LeaveOutRest(objects);
    FillHeader(objects, settled.steps);
    return CarryFiles();
  };
  if (Status done = work(); !done) {
    return Fail(std::move(done).error().WithContext(candidate_.Path()));
  }
  auto model = std::move(assembler_).Finish();
  if (!model) return Fail(std::move(model).error().WithContext(candidate_.Path()));
  return model;
}

// ---- weights ------------------------------------------------------------------------

void FsdpReader::FindParts() {
  for (size_t t = 0; t < tensors_.size(); ++t) {
    for (size_t p = 0; p < tensors_[t].parts.size(); ++p) {
      const FsdpTensor::Part& part = tensors_[t].parts[p];
      places_.emplace(part.stored, PartPlace{t, p});
      hyper_parameters_.try_emplace(part.parameter);
    }
  }
  const auto& objects = state_.metadata().objects;
  const auto& tensors = state_.metadata().tensors;
  const auto add = [&](KeyedEntry entry, std::string_view name) {
    const FsdpKey key = FsdpKeyOf(name);
    if (key.of != FsdpKey::Of::kGroup) return;
    const auto found = hyper_parameters_.find(key.name);
    if (found != hyper_parameters_.end()) found->second.push_back({std::string(key.rest), entry});
  };
  for (size_t i = 0; i < objects.size(); ++i) add({true, i}, objects[i].name);
  for (size_t i = 0; i < tensors.size(); ++i) add({false, i}, tensors[i].name);
}

// Parameters of a group are trained: `model` has what the optimizer updates of them.
Status FsdpReader::AddWeights() {
  if (tensors_.empty()) return Refuse("it does not hold the weights of a model");
  if (common_) computed_ = ComputedOf(*common_);
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const FsdpTensor& tensor = tensors_[t];
    const bool trained = !hyper_parameters_.find(tensor.parts.front().parameter)->second.empty();
    if (trained && !IsPlainFloat(tensor.dtype)) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", tensor.name, "' is trained, and saved as ", DTypeName(tensor.dtype),
                         " without the scales that it needs, and without a master"));
    }
    const PlaceParts place = [this, t](Assembler&, AtomIndex atom) {
      return state_.AddInsets(tensors_[t].Insets(), tensors_[t].shape, atom);
    };
    const bool master =
        trained && computed_ && tensor.dtype == DType::kF32 && !options_.weights_only;
    StateDict::Tensor& added = dict_.tensors.emplace_back();
    added.name = tensor.name;
    added.dtype = master ? *computed_ : tensor.dtype;
    added.shape = tensor.shape;
    added.packed = !IsFloat(tensor.dtype);
    if (!master) {
      added.place = place;
      continue;
    }
    masters_.insert(t);
    StateDict::State& state = dict_.states.emplace_back();
    state.owner = tensor.name;
    state.kind = kMaster;
    state.kinds = StateDict::Kinds::kOurs;
    state.dtype = tensor.dtype;
    state.shape = tensor.shape;
    state.place = place;
  }
  if (!masters_.empty()) dict_.model_dtype = computed_;
  return {};
}

// ---- the optimizer ------------------------------------------------------------------

void FsdpReader::LeaveOutOfOptimizer(std::string what, std::string why) {
  dict_.other_optimizers = true;  // a tensor without a state may be trained all the same
  LeaveOut(assembler_.header(), {LeftOutPart::kOptimizer, std::move(what), std::move(why), ""});
}

void FsdpReader::AddStates(dcp::ObjectReader& objects) {
  std::map<std::pair<size_t, std::string>, Parts> found;  // by tensor and kind
  const auto add = [&](KeyedEntry entry, std::string_view name) {
    const FsdpKey key = FsdpKeyOf(name);
    if (key.of == FsdpKey::Of::kOptimizer) {
      return LeaveOutOfOptimizer(StrCat("the key '", name, "'"),
                                 "it is neither a state nor a hyper-parameter of a parameter");
    }
    if (key.of != FsdpKey::Of::kState) return;
    const auto place = places_.find(key.name);
    if (place == places_.end()) {
      return LeaveOutOfOptimizer(StrCat("the key '", name, "'"),
                                 "it is a state of a tensor that the model does not have");
    }
    const auto [tensor, part] = place->second;
    Parts& parts = found[{tensor, std::string(key.rest)}];
    parts.resize(tensors_[tensor].parts.size());
    if (parts[part]) {
      return LeaveOutOfOptimizer(StrCat("the key '", name, "'"),
                                 "another key is the same state of this tensor");
    }
    parts[part] = entry;
  };
  const dcp::DcpMetadata& metadata = state_.metadata();
  for (size_t i = 0; i < metadata.tensors.size(); ++i) add({false, i}, metadata.tensors[i].name);
  for (size_t i = 0; i < metadata.objects.size(); ++i) add({true, i}, metadata.objects[i].name);
  for (const auto& [of, parts] : found) {
    const auto& [tensor, kind] = of;
    std::string why = AddState(tensor, kind, parts, objects);
    if (why.empty()) continue;
    LeaveOutOfOptimizer(StrCat("the state '", kind, "' of '", tensors_[tensor].name, "'"),
                        std::move(why));
  }
}

// Says why a state is not taken; "" if it is.  It is made of parts as its tensor is.
std::string FsdpReader::AddState(size_t t, const std::string& kind, const Parts& parts,
                                 dcp::ObjectReader& objects) {
  const FsdpTensor& tensor = tensors_[t];
  if (std::ranges::find(kOurKinds, kind) != std::end(kOurKinds)) {
    return "its kind has a name that ckptfs uses for something else";
  }
  StateDict::State added{0, tensor.name, kind};
  std::vector<dcp::StoredState::Inset> insets;
  std::vector<KeyedEntry> scalars;
  for (size_t p = 0; p < parts.size(); ++p) {
    if (!parts[p]) return StrCat("'", tensor.parts[p].stored, "' does not have it");
    const dcp::TensorEntry* entry =
        parts[p]->object ? nullptr : &state_.metadata().tensors[parts[p]->index];
    if (entry == nullptr || entry->shape.empty()) {
      scalars.push_back(*parts[p]);
      continue;
    }
    const auto& of = tensor.parts[p].inset;
    if (entry->shape != state_.metadata().tensors[of.tensor].shape) {
      return StrCat("that of '", tensor.parts[p].stored, "' does not have its tensor's shape");
    }
    if (!insets.empty() && entry->dtype != added.dtype) return "its parts are of several types";
    if (std::string why = state_.WhyNotPlain(parts[p]->index); !why.empty()) return why;
    added.dtype = entry->dtype;
    insets.push_back({parts[p]->index, of.begin});
  }
  if (!insets.empty() && !scalars.empty()) return "it is a number of some parts alone";
  if (insets.empty()) {
    added.scalar = [scalars, &objects]() -> Result<std::optional<ScalarValue>> {
      std::optional<ScalarValue> out;
      for (const KeyedEntry& one : scalars) {
        CKPT_ASSIGN_OR_RETURN(const auto value, objects.Scalar(one));
        if (!value || (out && *out != *value)) return std::optional<ScalarValue>();
        out = value;
      }
      return out;
    };
  } else {
    added.shape = tensor.shape;
    added.place = [this, t, insets = std::move(insets)](Assembler&, AtomIndex atom) {
      return state_.AddInsets(insets, tensors_[t].shape, atom);
    };
  }
  dict_.states.push_back(std::move(added));
  return "";
}

// ---- groups -------------------------------------------------------------------------

// The hyper-parameters of a tensor, which all of its parts have alike; nothing where they do not.
Result<std::optional<std::string>> FsdpReader::HyperParametersOf(size_t tensor,
                                                                 dcp::ObjectReader& objects) {
  std::optional<std::string> out;
  std::set<std::string_view> seen;
  for (const FsdpTensor::Part& part : tensors_[tensor].parts) {
    if (!seen.insert(part.parameter).second) continue;
    auto& items = hyper_parameters_.find(part.parameter)->second;
    std::ranges::sort(items, {}, &dcp::ObjectReader::Item::key);
    std::vector<KeyedEntry> others;
    CKPT_ASSIGN_OR_RETURN(const std::string all, objects.HyperParameters(items, others));
    for (const KeyedEntry entry : others) {
      const FsdpKey key = FsdpKeyOf(objects.KeyOf(entry));
      LeaveOut(assembler_.header(),
               {LeftOutPart::kOptimizer, StrCat("the hyper-parameter '", key.rest, "'"),
                "it is not a number, a text or a list of them", ""});
    }
    CKPT_ASSIGN_OR_RETURN(const ParsedPickle parsed, ParsePickle(all));
    CKPT_ASSIGN_OR_RETURN(std::string own,
                          ckptfs::megatron::HyperParametersOf(RootOf(parsed.tree)));
    if (items.empty() || (out && *out != own)) return std::optional<std::string>();
    out = std::move(own);
  }
  return out;
}

// Parameters of equal hyper-parameters make a group.
Status FsdpReader::AddGroups(dcp::ObjectReader& objects) {
  std::set<std::string_view> with_states;
  for (const StateDict::State& state : dict_.states) {
    with_states.insert(std::get<std::string>(state.owner));
  }
  std::vector<std::pair<std::string, std::vector<size_t>>> groups;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    CKPT_ASSIGN_OR_RETURN(auto own, HyperParametersOf(t, objects));
    if (!own) {
      const auto some = [&](const FsdpTensor::Part& part) {
        return !hyper_parameters_.find(part.parameter)->second.empty();
      };
      const bool contradicts = std::ranges::any_of(tensors_[t].parts, some);
      if (!contradicts && !with_states.contains(tensors_[t].name)) continue;  // it is not trained
      LeaveOutOfOptimizer(StrCat("the hyper-parameters of '", tensors_[t].name, "'"),
                          contradicts ? "its parts have different ones" : "none are saved");
      continue;
    }
    const auto known =
        std::ranges::find(groups, *own, &std::pair<std::string, std::vector<size_t>>::first);
    if (known != groups.end()) {
      known->second.push_back(t);
    } else {
      groups.push_back({*std::move(own), {t}});
    }
  }
  for (auto& [own, members] : groups) CKPT_RETURN_IF_ERROR(AddGroup(std::move(own), members));
  return {};
}

// A group counts its steps, where the states do not.
Status FsdpReader::AddGroup(std::string hyper_parameters, const std::vector<size_t>& members) {
  CKPT_ASSIGN_OR_RETURN(const ParsedPickle parsed, ParsePickle(hyper_parameters));
  const auto step = RootOf(parsed.tree)["step"].Int();
  StateDict::Group& group = dict_.groups.emplace_back();
  group.hyper_parameters = std::move(hyper_parameters);
  std::set<std::string_view> trained, counted;
  for (const StateDict::State& state : dict_.states) {
    const auto& owner = std::get<std::string>(state.owner);
    trained.insert(owner);
    if (state.kind == "step") counted.insert(owner);
  }
  std::vector<std::string> uncounted;
  for (const size_t t : members) {
    const std::string& name = tensors_[t].name;
    group.members.push_back({name, std::nullopt});
    if (trained.contains(name) && !counted.contains(name)) uncounted.push_back(name);
  }
  for (std::string& name : uncounted) {
    if (step) dict_.states.push_back(StepState(std::move(name), *step));
  }
  return {};
}

// ---- the rest -----------------------------------------------------------------------

Status FsdpReader::AddDocuments(dcp::ObjectReader& objects) {
  std::vector<KeyedEntry> entries;
  const auto add = [&](KeyedEntry entry, std::string_view name) {
    if (FsdpKeyOf(name).of != FsdpKey::Of::kOther) return;
    if (std::ranges::find(kOfRanks, FirstWord(name)) != std::end(kOfRanks)) return;
    entries.push_back(entry);
  };
  const dcp::DcpMetadata& metadata = state_.metadata();
  for (size_t i = 0; i < metadata.tensors.size(); ++i) add({false, i}, metadata.tensors[i].name);
  for (size_t i = 0; i < metadata.objects.size(); ++i) add({true, i}, metadata.objects[i].name);
  CKPT_ASSIGN_OR_RETURN(auto documents, objects.Documents(entries));
  std::ranges::move(documents, std::back_inserter(assembler_.header().documents));
  return {};
}

void FsdpReader::LeaveOutRest(const dcp::ObjectReader& objects) {
  StepModel& header = assembler_.header();
  std::set<std::string> in_model;
  std::set<std::string_view> of_ranks;
  const auto look = [&](std::string_view name, bool object) {
    const FsdpKey key = FsdpKeyOf(name);
    if (object && key.of == FsdpKey::Of::kModel) in_model.emplace(key.name);
    const auto found = std::ranges::find(kOfRanks, FirstWord(name));
    if (found != std::end(kOfRanks)) of_ranks.insert(*found);
  };
  for (const auto& tensor : state_.metadata().tensors) look(tensor.name, false);
  for (const auto& object : state_.metadata().objects) look(object.name, true);
  LeaveOutEntries(in_model, header);
  for (const std::string_view word : of_ranks) {
    LeaveOut(header, {LeftOutPart::kDocument, StrCat("'", word, "'"),
                      "each rank saved its own, which no rank of another layout has", ""});
  }
  for (const auto& [key, why] : objects.left_out()) {
    const bool optimizer = FsdpKeyOf(key).of != FsdpKey::Of::kOther;
    LeaveOut(header, {optimizer ? LeftOutPart::kOptimizer : LeftOutPart::kDocument,
                      StrCat("the key '", key, "'"), why, ""});
  }
}

void FsdpReader::FillHeader(const dcp::ObjectReader& objects, std::optional<uint64_t> steps) {
  StepModel& header = assembler_.header();
  header.framework = "megatron_fsdp";
  header.id = candidate_.id;
  header.iteration = objects.iteration().value_or(candidate_.iteration);
  if (header.iteration == 0) header.iteration = steps.value_or(0);
  const auto layout = common_ ? LayoutOf(*common_) : std::nullopt;
  if (layout) header.layout = *layout;
  if (!common_) {
    header.notes.push_back(
        "the job's arguments are not there: weights are in the type in which they are trained, and "
        "sizes are not known (--hf-config, --family-set)");
  }
  if (!masters_.empty()) {
    header.notes.push_back(StrCat("the weights are not saved in ", DTypeName(*computed_),
                                  ", which the job computes with: they are the masters, cast, as "
                                  "Megatron-FSDP makes them"));
  }
}

Status FsdpReader::CarryFiles() {
  const auto root = RootBelow(candidate_.root, candidate_.save);
  CKPT_ASSIGN_OR_RETURN(const ModelFiles files,
                        CarryModelFiles(assembler_, root, candidate_.Prefix()));
  if (files.config() == nullptr && common_) CarryConfigOf(*common_, dict_.tensors, assembler_);
  return CarryOwnFiles(assembler_, candidate_);
}

}  // namespace ckptfs::megatron
