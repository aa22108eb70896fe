// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/reader.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_config.h"
#include "formats/megatron/buckets/bucket_keys.h"
#include "formats/megatron/flattened_state.h"
#include "formats/megatron/job/job_state.h"
#include "formats/megatron/module_keys.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::megatron {
namespace {

constexpr uint64_t kMaxTensors = uint64_t{1} << 20;
constexpr std::string_view kMaster = "master";
constexpr std::string_view kOurKinds[] = {"weight", "master", "step"};

std::string_view KindOf(std::string_view stored) {
  return stored == "param" || stored == "fp32_param" ? kMaster : stored;
}

}  // namespace

Result<StepModel> Reader::Read() && {
  dcp::PartFiles part;
  part.metadata = true;
  CKPT_ASSIGN_OR_RETURN(dcp::StoredState state,
                        dcp::StoredState::Read(candidate_, {part}, assembler_));
  CKPT_ASSIGN_OR_RETURN(const CommonState common, CommonState::Read(candidate_, state, assembler_));
  const auto work = [&]() -> Result<Settled> {
    CKPT_RETURN_IF_ERROR(AddWeights(state, common));
    if (!options_.weights_only) {
      AddStates(state);
      CKPT_RETURN_IF_ERROR(AddBuckets(state, common));
      CKPT_RETURN_IF_ERROR(AddAllGroups(common));
    }
    CKPT_ASSIGN_OR_RETURN(dict_.sizes, SizesOf(common.Arguments(), options_, candidate_));
    dict_.sizes.recorded.erase("vocab");  // not the tokenizer's, whose last ids it may lack
    dict_.sizes.recorded.erase("vocab_size");
    CKPT_ASSIGN_OR_RETURN(Settled settled, Settle(dict_, options_, assembler_));
    CKPT_RETURN_IF_ERROR(AddDocuments(
        common, [](std::string_view key) { return key == "optimizer"; }, assembler_.header()));
    assembler_.header().facts.modules = ModuleKeysOf(state.metadata());
    return settled;
  };
  auto settled = work();
  if (!settled) return Fail(std::move(settled).error().WithContext(candidate_.Path()));
  if (!options_.weights_only) LeaveOutBuckets(state, common);
  LeaveOutObjects(state);
  const auto root = RootBelow(candidate_.root, candidate_.save);
  CKPT_ASSIGN_OR_RETURN(const ModelFiles files,
                        CarryModelFiles(assembler_, root, candidate_.Prefix()));
  if (files.config() == nullptr) CarryConfigOf(common, dict_.tensors, assembler_);
  CKPT_RETURN_IF_ERROR(CarryOwnFiles(assembler_, candidate_));
  FillHeader(common, settled->steps);
  auto model = std::move(assembler_).Finish();
  if (!model) return Fail(std::move(model).error().WithContext(candidate_.Path()));
  return model;
}

// ---- weights ------------------------------------------------------------------------

// Every stack has a layer for each of the model's.
Status Reader::CheckLayers(const dcp::StoredState& state, const CommonState& common) const {
  const auto known = common.Argument("num_layers");
  std::map<std::string_view, std::pair<uint64_t, std::string_view>> layers;  // by block
  for (const dcp::TensorEntry& tensor : state.metadata().tensors) {
    if (OptimizerKeyOf(tensor.name)) continue;
    const auto stacked = StackedNameOf(tensor.name);
    if (!stacked) continue;
    if (tensor.shape.empty()) {
      return Refuse("'", tensor.name, "' does not have a dimension that counts the layers");
    }
    const uint64_t count = tensor.shape.front();
    const auto [first, fresh] = layers.try_emplace(stacked->before, count, tensor.name);
    if (first->second.first != count) {
      return Refuse("'", first->second.second, "' is of ", first->second.first, " layers, but '",
                    tensor.name, "' of ", count);
    }
    if (fresh && known && stacked->before == "decoder.layers." &&
        count != static_cast<uint64_t>(*known)) {
      return Refuse("'", tensor.name, "' is of ", count,
                    " layers, but the arguments say num_layers ", *known);
    }
  }
  return {};
}

PlaceParts Reader::PlaceOf(const dcp::StoredState& state, Slice slice) const {
  return [&state, slice](Assembler&, AtomIndex atom) {
    return slice.layer < 0 ? state.AddFragments(slice.tensor, atom)
                           : state.AddRow(slice.tensor, static_cast<uint64_t>(slice.layer), atom);
  };
}

Status Reader::AddWeights(const dcp::StoredState& state, const CommonState& common) {
  CKPT_RETURN_IF_ERROR(CheckLayers(state, common));
  struct Named {
    std::string name;
    Slice slice;
  };
  std::vector<Named> all;
  const auto& tensors = state.metadata().tensors;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (OptimizerKeyOf(tensors[t].name)) continue;
    const auto stacked = StackedNameOf(tensors[t].name);
    const uint64_t count = stacked ? tensors[t].shape.front() : 1;
    if (count > kMaxTensors || all.size() + count > kMaxTensors) {
      return Refuse("the step would have more than ", kMaxTensors, " tensors");
    }
    for (uint64_t layer = 0; layer < count; ++layer) {
      if (stacked) all.push_back({stacked->OfLayer(layer), {t, static_cast<int64_t>(layer)}});
    }
    if (!stacked) all.push_back({tensors[t].name, {t, -1}});
  }
  if (all.empty()) return Refuse("it does not hold the weights of a model");
  std::ranges::sort(all, {},
                    [](const Named& one) { return ModuleOrderOf(one.name, one.slice.layer); });
  for (Named& one : all) {
    const dcp::TensorEntry& tensor = tensors[one.slice.tensor];
    Shape shape = tensor.shape;
    if (one.slice.layer >= 0) shape.erase(shape.begin());
    made_[tensor.name].push_back(dict_.tensors.size());
    slices_.push_back(one.slice);
    dict_.tensors.push_back({std::move(one.name),
                             tensor.dtype,
                             std::move(shape),
                             PlaceOf(state, one.slice),
                             {},
                             !IsFloat(tensor.dtype)});
  }
  for (auto& [key, numbers] : made_) {
    std::ranges::sort(numbers, {}, [&](size_t i) { return slices_[i].layer; });
  }
  return {};
}

// ---- the optimizer ------------------------------------------------------------------

void Reader::AddStates(const dcp::StoredState& state) {
  dict_.optimizers.push_back({.label = "", .what = "the optimizer", .shown = ""});
  const auto& tensors = state.metadata().tensors;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const auto key = OptimizerKeyOf(tensors[t].name);
    if (key && !key->kind.empty()) AddState(state, t, *key);
  }
}

// A state has its tensor's layers and shape, or what cores up to 0.14 make of that shape.
void Reader::AddState(const dcp::StoredState& state, size_t t, const OptimizerKey& key) {
  const dcp::TensorEntry& entry = state.metadata().tensors[t];
  const auto leave_out = [&](std::string_view why) {
    dict_.other_optimizers = true;  // a tensor without a state may be trained all the same
    LeaveOut(assembler_.header(),
             {LeftOutPart::kOptimizer, StrCat("the key '", entry.name, "'"), std::string(why), ""});
  };
  if (std::ranges::find(kOurKinds, key.kind) != std::end(kOurKinds)) {
    return leave_out("its kind has a name that ckptfs uses for something else");
  }
  const auto of = made_.find(key.tensor);
  if (of == made_.end()) return leave_out("it is a state of a tensor that the model does not have");
  if (const std::string why = state.WhyNotPlain(t); !why.empty()) return leave_out(why);
  const Slice slice = slices_[of->second.front()];
  const dcp::TensorEntry& tensor = state.metadata().tensors[slice.tensor];
  std::shared_ptr<const FlattenedState> flattened;
  if (entry.shape != tensor.shape) {
    if (!IsFlattened(entry.shape, tensor.shape)) {
      return leave_out("it does not have its tensor's shape, nor what ranks made of that");
    }
    auto made = FlattenedState::Make(state, t, tensor.shape);
    if (!made) return leave_out(made.error().message);
    flattened = *std::move(made);
    if (slice.layer >= 0 && !flattened->HasLayers()) {
      return leave_out("ranks had more than one layer in a piece");
    }
  }
  if (!states_.emplace(KindOf(key.kind), key.tensor).second) {
    return leave_out("another optimizer of the chain has the same state of this tensor");
  }
  for (const size_t i : of->second) {
    StateDict::State added{0, dict_.tensors[i].name, std::string(KindOf(key.kind))};
    added.kinds = StateDict::Kinds::kOurs;
    added.dtype = entry.dtype;
    added.shape = dict_.tensors[i].shape;
    added.place = PlaceOf(state, {t, slices_[i].layer});
    if (flattened) {
      added.place = [flattened, layer = slices_[i].layer](Assembler& assembler, AtomIndex atom) {
        return flattened->Place(layer, assembler, atom);
      };
    }
    dict_.states.push_back(std::move(added));
  }
}

// An optimizer is taken whole or not at all.
Status Reader::AddBuckets(dcp::StoredState& state, const CommonState& common) {
  for (const std::string& chain : BucketOptimizersOf(state.metadata())) {
    auto decoded = DecodeBuckets(state, common, chain, dict_.tensors, slices_);
    if (!decoded) {
      const ErrorCode code = decoded.error().code;
      if (code != ErrorCode::kInvalid && code != ErrorCode::kUnsupported) {
        return Fail(std::move(decoded).error());
      }
      chains_[chain] = std::move(decoded).error().message;
      continue;
    }
    std::set<std::pair<std::string, std::string>> names;
    for (const StateDict::State& one : decoded->states) {
      names.emplace(one.kind, std::get<std::string>(one.owner));
    }
    const auto known = std::ranges::find_if(dict_.states, [&](const StateDict::State& one) {
      return names.contains({one.kind, std::get<std::string>(one.owner)});
    });
    if (known != dict_.states.end()) {
      chains_[chain] = StrCat("another optimizer has the same state of '",
                              std::get<std::string>(known->owner), "'");
      continue;
    }
    chains_[chain] = "";
    std::ranges::move(decoded->states, std::back_inserter(dict_.states));
    buckets_.push_back(*std::move(decoded));
  }
  dict_.other_optimizers |= !UnknownBuckets(state).empty();
  return {};
}

// The first key of each optimizer whose buckets are not proved, or are of a form that is not known.
std::map<std::string_view, std::string_view> Reader::UnknownBuckets(
    const dcp::StoredState& state) const {
  std::map<std::string_view, std::string_view> first;  // by optimizer
  const auto note = [&](std::string_view name) {
    const auto key = OptimizerKeyOf(name);
    if (!key || !key->kind.empty()) return;
    const auto decoded = chains_.find(key->chain);
    if (decoded == chains_.end() || !decoded->second.empty()) first.try_emplace(key->chain, name);
  };
  for (const auto& tensor : state.metadata().tensors) note(tensor.name);
  for (const auto& object : state.metadata().objects) note(object.name);
  return first;
}

void Reader::LeaveOutBuckets(const dcp::StoredState& state, const CommonState& common) {
  const std::string form = common.OptimizerForm();
  for (const auto& [chain, name] : UnknownBuckets(state)) {
    const auto decoded = chains_.find(chain);
    std::string why = StrCat("they lie in buckets of the ranks that saved them",
                             form.empty() ? "" : StrCat(" (", form, ")"), ", ");
    why += decoded == chains_.end()
               ? "in a form that is not known"
               : StrCat("and nothing proves which parameter lies where: ", decoded->second);
    LeaveOut(assembler_.header(),
             {LeftOutPart::kOptimizer, StrCat("the optimizer's states ('", name, "', ...)"),
              std::move(why),
              "save with --dist-ckpt-optim-fully-reshardable to have masters and moments"});
  }
}

Status Reader::AddAllGroups(const CommonState& common) {
  std::vector<CommonGroup> groups = common.Groups();
  for (const BucketStates& one : buckets_) {
    groups.insert(groups.end(), one.hyper_parameters.begin(), one.hyper_parameters.end());
  }
  return AddGroups(groups, common.CommonStep(), common, assembler_.header(), dict_);
}

// ---- the rest -----------------------------------------------------------------------

// Objects of ranks: nobody else's ranks have them.
void Reader::LeaveOutObjects(const dcp::StoredState& state) {
  constexpr std::string_view kRead[] = {"optimizer", "per_bucket_numel",
                                        "per_bucket_numel_unpadded"};
  std::set<std::string> in_model, others, in_optimizer;
  for (const dcp::ObjectEntry& object : state.metadata().objects) {
    const std::string_view name = ObjectName(object.name);
    const auto group = GroupObjectKeyOf(name);
    if (group && std::ranges::find(kRead, group->what) == std::end(kRead)) {
      in_optimizer.emplace(group->what);
    }
    if (object.name == kCommonObject || OptimizerKeyOf(name)) continue;
    (name.ends_with(kExtraState) ? in_model : others).emplace(name);
  }
  LeaveOutEntries(in_model, assembler_.header());
  for (const std::string& name : in_optimizer) {
    LeaveOut(assembler_.header(), {LeftOutPart::kDocument, StrCat("'", name, "' of the optimizer"),
                                   "nothing of another layout has it", ""});
  }
  for (const std::string& name : others) {
    LeaveOut(assembler_.header(),
             {LeftOutPart::kDocument, StrCat("'", name, "'"),
              "each rank saved its own, which no rank of another layout has", ""});
  }
}

void Reader::FillHeader(const CommonState& common, std::optional<uint64_t> steps) {
  StepModel& header = assembler_.header();
  header.framework = "megatron";
  header.id = candidate_.id;
  header.iteration = common.Iteration().value_or(candidate_.iteration);
  if (header.iteration == 0) header.iteration = steps.value_or(0);
  if (const auto layout = LayoutOf(common)) header.layout = *layout;
  if (!buckets_.empty()) {
    header.notes.push_back(
        "masters and moments lay in buckets of ranks, which do not say which parameter lies where: "
        "that is computed again, and proved by the weights, which are the masters, cast");
  }
  if (!dict_.groups.empty()) {
    header.notes.push_back(
        "which parameters each group of the optimizer has follows Megatron's rule: experts of "
        "expert parallelism apart, no weight decay for biases and vectors");
  }
}

}  // namespace ckptfs::megatron
