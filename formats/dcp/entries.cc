// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/entries.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <unordered_set>
#include <utility>

#include "core/base/strings.h"
#include "core/model/step_counts.h"
#include "core/tensor/cast.h"
#include "formats/dcp/document_entries.h"
#include "formats/dcp/object_archives.h"
#include "formats/dcp/source_keys.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/pickle/text.h"
#include "formats/torch/source_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kOwnDocuments = "ckptfs.";  // for the package alone
constexpr std::string_view kExtraState = "extra_state/";

// States that begin as zeros, so that a parameter which never had a gradient can be
// given them; others (Adagrad's sum, Rprop's step sizes) begin elsewhere.
constexpr std::array<std::string_view, 4> kBeginAsZeros = {"exp_avg", "exp_avg_sq",
                                                           "max_exp_avg_sq", "step"};

Status CheckDType(DType dtype, std::string_view what) {
  if (ByteWidth(dtype) > 0 && !TorchName(dtype).empty()) return {};
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat("torch has no dtype ", DTypeName(dtype), " of whole bytes")}
                  .OfParameter(what));
}

// A number as an element of the dtype; nothing if it is not one of that.
std::optional<std::string> OneElement(PickleRef value, DType dtype) {
  const auto bytes = [](auto number) {
    return std::string(std::bit_cast<std::array<char, sizeof(number)>>(number).data(),
                       sizeof(number));
  };
  if (const auto truth = value ? value.Bool() : std::nullopt; truth && dtype == DType::kBool) {
    return std::string(1, static_cast<char>(*truth));
  }
  const auto whole = value ? value.Int() : std::nullopt;
  if (whole && dtype == DType::kI64) return bytes(*whole);
  if (whole && dtype == DType::kI32) return bytes(static_cast<int32_t>(*whole));
  if (whole && dtype == DType::kI16) return bytes(static_cast<int16_t>(*whole));
  if (whole && (dtype == DType::kI8 || dtype == DType::kU8))
    return bytes(static_cast<uint8_t>(*whole));
  const auto number = value ? value.Number() : std::nullopt;
  if (!number || !IsFloat(dtype)) return std::nullopt;
  const std::string wide = bytes(*number);
  if (dtype == DType::kF64) return wide;
  const CastFunction cast = FindCast(DType::kF64, dtype);
  if (cast == nullptr) return std::nullopt;
  std::string out(ByteWidth(dtype), '\0');
  cast(std::as_bytes(std::span(wide)).data(), std::as_writable_bytes(std::span(out)).data(), 1);
  return out;
}

// A group of an optimizer, and where its hyper-parameters stand.
struct PlacedGroup {
  const ShownGroup& shown;
  const Group& recorded;
  const std::string& optimizer;  // the key
  uint32_t number;               // in that optimizer
};

class Collector {
 public:
  Collector(const ShownState& shown, const KeyShape& keys)
      : shown_(shown), step_(shown.step()), traits_(TraitsOf(step_)), keys_(keys) {}

  Result<std::vector<Entry>> Collect() && {
    CKPT_RETURN_IF_ERROR(AddModel());
    CKPT_RETURN_IF_ERROR(AddStates());
    CKPT_RETURN_IF_ERROR(AddOtherStates());
    CKPT_RETURN_IF_ERROR(AddGroups());
    CKPT_RETURN_IF_ERROR(CheckKeys());
    CKPT_RETURN_IF_ERROR(AddDocuments());
    return std::move(entries_);
  }

 private:
  // As an optimizer's keys have it.
  const std::string& StateName(ParameterIndex index) const {
    const std::string& name = shown_.NameOf(index);
    const auto found = keys_.state_names.find(name);
    return found == keys_.state_names.end() ? name : found->second;
  }

  // Appends an entry; its key follows from the path.
  Entry& Add(std::vector<PathStep> path) {
    Entry entry;
    entry.key = KeyOf(path);
    entry.path = std::move(path);
    entries_.push_back(std::move(entry));
    return entries_.back();
  }

  Entry& AddTensor(std::vector<PathStep> path, DType dtype, const Shape& shape) {
    Entry& entry = Add(std::move(path));
    entry.tensor = true;
    entry.dtype = dtype;
    entry.shape = shape;
    return entry;
  }

  std::optional<uint64_t> ParametersNumber(const std::string& label,
                                           ParameterIndex parameter) const {
    return keys_.NumberOf(label, step_.parameter(parameter).name);
  }
  std::vector<PathStep> StatePath(const std::string& label, ParameterIndex parameter,
                                  const std::string& kind) const {
    const auto number = ParametersNumber(label, parameter);
    return keys_.StatePath(label, number ? std::to_string(*number) : StateName(parameter), kind);
  }

  std::optional<uint32_t> TensorParallelDim(const Parameter& parameter, const Shape& shape) const {
    if (shown_.layout().tp == 1 || parameter.expert || parameter.stacked_experts > 0)
      return std::nullopt;
    if (!IsOneCut(parameter.pattern)) return std::nullopt;
    const uint32_t dim = parameter.pattern.cuts[0].dim;
    return dim < shape.size() ? std::optional(dim) : std::nullopt;
  }

  // Both names of a tied weight, as a module's state dict has both.
  Status AddModel() {
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      if (!IsOfModel(step_.parameters[i])) continue;
      CKPT_RETURN_IF_ERROR(AddWeight(shown_.NameOf(ParameterIndex{i}), ParameterIndex{i}));
    }
    for (const Alias& alias : shown_.aliases()) {
      CKPT_RETURN_IF_ERROR(AddWeight(alias.name, alias.parameter));
    }
    return {};
  }

  Status AddWeight(const std::string& name, ParameterIndex parameter) {
    CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(parameter));
    CKPT_RETURN_IF_ERROR(CheckDType(weight.dtype, name));
    Entry& entry = AddTensor(keys_.ModelPath(name), weight.dtype, step_.atom(weight.atom).shape);
    entry.tp_dim = TensorParallelDim(step_.parameter(parameter), entry.shape);
    entry.body = weight.atom;
    return {};
  }

  Status AddStates() {
    for (const AtomIndex index : shown_.states()) {
      if (IsEntry(index)) CKPT_RETURN_IF_ERROR(AddState(index));
    }
    return {};
  }

  // False of what some ranks alone wrote; DCP has it whole, as torch would load it anywhere.
  bool IsEntry(AtomIndex index) const {
    return traits_.own_keys || step_.atom(index).relation != Relation::kOpaque;
  }

  StatesByKind ShownStatesOf(ParameterIndex parameter) const {
    StatesByKind states = shown_.StatesOf(parameter);
    std::erase_if(states, [&](const auto& state) { return !IsEntry(state.second); });
    return states;
  }

  Status AddState(AtomIndex index) {
    const Atom& atom = step_.atom(index);
    const auto path = StatePath(atom.optimizer, atom.parameter, atom.kind);
    const auto number = NumberOf(atom);
    const bool step = atom.kind == "step" && number;
    // torch's optimizers count in an fp32 tensor, whatever others do; a dict of torch's has what it
    // had.
    if (number && IsPythonNumber(atom.source) && (!step || traits_.torch_states)) {
      return AddNumber(path, atom.dtype, *number);
    }
    if (step && !traits_.torch_states) return AddStep(path, atom.parameter, *number);
    CKPT_RETURN_IF_ERROR(
        CheckDType(atom.dtype, StrCat(shown_.NameOf(atom.parameter), "/", atom.kind)));
    Entry& entry = AddTensor(path, atom.dtype, atom.shape);
    if (atom.relation == Relation::kSame) {
      entry.tp_dim = TensorParallelDim(step_.parameter(atom.parameter), atom.shape);
    }
    entry.body = index;
    return {};
  }

  // A number of Python's: an int, or a float.
  Status AddNumber(std::vector<PathStep> path, DType dtype, double number) {
    return AddObject(std::move(path), [&](PickleBuilder& b) {
      return dtype == DType::kI64 ? b.Int(static_cast<int64_t>(number)) : b.Float(number);
    });
  }

  Status AddStep(std::vector<PathStep> path, ParameterIndex parameter, double number) {
    auto bytes = StepBytes(number);
    if (!bytes) return Fail(std::move(bytes).error().WithContext(shown_.NameOf(parameter)));
    AddTensor(std::move(path), DType::kF32, {}).body = ShortTensor{*std::move(bytes)};
    return {};
  }

  Status AddObject(std::vector<PathStep> path, const std::function<NodeId(PickleBuilder&)>& value) {
    PickleBuilder builder;
    const NodeId root = value(builder);
    CKPT_ASSIGN_OR_RETURN(ObjectBytes archive, objects_.Of(std::move(builder).Finish(root)));
    Add(std::move(path)).body = std::move(archive);
    return {};
  }

  Status AddGroups() {
    std::map<std::string_view, uint32_t> numbers;  // by the optimizer's key
    for (size_t g = 0; g < step_.groups.size(); ++g) {
      const Group& recorded = step_.groups[g];
      const std::string& optimizer = keys_.OptimizerKey(recorded.optimizer);
      auto added = AddGroup({shown_.groups()[g], recorded, optimizer, numbers[optimizer]++});
      if (!added) return Fail(std::move(added).error().WithContext(StrCat("group ", g)));
    }
    return {};
  }

  Status AddGroup(const PlacedGroup& group) {
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree,
                          TorchHyperParameters(shown_, group.shown, traits_.own_keys));
    const PickleRef dict = RootOf(tree);
    CKPT_RETURN_IF_ERROR(AddMissingStates(group, dict));
    if (!keys_.flat) CKPT_RETURN_IF_ERROR(AddMembers(group));
    for (const auto& [key, value] : dict.Items()) {
      CKPT_RETURN_IF_ERROR(AddGiven(group, std::string(*key.String()), value));
    }
    return AddGroupStep(group, dict);
  }

  // A hyper-parameter of the source; one that is a dict is flattened as all of a state is.
  Status AddGiven(const PlacedGroup& group, const std::string& key, PickleRef value) {
    const auto copy = [](PickleRef of) {
      return [of](PickleBuilder& builder) { return builder.Copy(of); };
    };
    if (keys_.flat) return AddHyperParameter(group, key, copy(value), value);
    return ForEachLeaf(value, PathInGroup(group, key), [&](const auto& path, PickleRef one) {
      return AddHyperParameterAt(path, copy(one), one);
    });
  }

  static std::vector<PathStep> PathInGroup(const PlacedGroup& group, const std::string& key) {
    return Below(group.optimizer, {{"param_groups", {}}, {"", group.number}, {key, {}}});
  }

  Status AddMembers(const PlacedGroup& group) {
    CKPT_RETURN_IF_ERROR(AddHyperParameter(group, "params", [&](PickleBuilder& builder) {
      std::vector<NodeId> items;
      for (const ParameterIndex p : group.recorded.parameters) {
        const auto number = ParametersNumber(group.recorded.optimizer, p);
        items.push_back(number ? builder.Int(static_cast<int64_t>(*number))
                               : builder.String(StateName(p)));
      }
      return builder.List(std::move(items));
    }));
    return AddMemberNames(group);
  }

  // An optimizer of named parameters asks for the names of its members.
  Status AddMemberNames(const PlacedGroup& group) {
    CKPT_ASSIGN_OR_RETURN(const auto names, RecordedMemberNames(group.recorded));
    if (!names) return {};
    return AddHyperParameter(group, "param_names", [&](PickleBuilder& builder) {
      if (traits_.own_keys && !RootOf(*names).IsNone()) return builder.Copy(RootOf(*names));
      std::vector<NodeId> items;
      for (const ParameterIndex p : group.recorded.parameters) {
        items.push_back(builder.String(StateName(p)));
      }
      return builder.List(std::move(items));
    });
  }

  // `number`: what the value is, if the source has it.
  Status AddHyperParameter(const PlacedGroup& group, const std::string& key,
                           const std::function<NodeId(PickleBuilder&)>& value,
                           PickleRef number = {}) {
    if (!keys_.flat) return AddHyperParameterAt(PathInGroup(group, key), value, number);
    for (const ParameterIndex p : group.recorded.parameters) {
      CKPT_RETURN_IF_ERROR(AddHyperParameterAt(
          Below(group.optimizer, {{StrCat("param_groups.", StateName(p), ".", key), {}}}), value,
          number));
    }
    return {};
  }

  Status AddHyperParameterAt(std::vector<PathStep> path,
                             const std::function<NodeId(PickleBuilder&)>& value, PickleRef number) {
    const auto tensor = keys_.tensors.find(KeyOf(path));
    const auto bytes =
        tensor == keys_.tensors.end() ? std::nullopt : OneElement(number, tensor->second.first);
    if (!bytes) return AddObject(std::move(path), value);
    AddTensor(std::move(path), tensor->second.first, tensor->second.second).body =
        ShortTensor{*bytes};
    return {};
  }

  // Optimizers that count per group (apex's and DeepSpeed's FusedAdam) ask for the
  // group's step: it is known if its parameters agree.
  Status AddGroupStep(const PlacedGroup& group, PickleRef dict) {
    if (dict["step"]) return {};
    std::optional<double> common;
    for (const ParameterIndex p : group.recorded.parameters) {
      const auto steps = begun_at_zero_.contains(p) ? std::optional(0.0) : StepsOf(step_, p);
      if (!steps || (common && *common != *steps)) return {};
      common = steps;
    }
    if (!common) return {};
    const auto whole = static_cast<int64_t>(*common);
    if (static_cast<double>(whole) != *common) return {};
    return AddHyperParameter(group, "step", [&](PickleBuilder& b) { return b.Int(whole); });
  }

  // States that a target asks for and the source does not have by themselves: the step
  // that the group counts, and Adam's start for a parameter that never had a gradient.
  Status AddMissingStates(const PlacedGroup& group, PickleRef dict) {
    StatesByKind kinds;  // of all members, with the atom of one that has it
    for (const ParameterIndex p : group.recorded.parameters) kinds.merge(ShownStatesOf(p));
    // A parameter may be without states since they were left out.
    const bool zeros =
        FindLostState(step_, group.recorded.optimizer) == nullptr &&
        std::ranges::all_of(kinds, [](const auto& state) {
          return std::ranges::find(kBeginAsZeros, state.first) != kBeginAsZeros.end();
        });
    const bool counted = kinds.contains("step");
    const std::optional<double> group_step = counted ? std::nullopt : dict["step"].Number();
    for (const ParameterIndex p : group.recorded.parameters) {
      const bool never = ShownStatesOf(p).empty() && !begun_.contains(p);
      if (never && (!zeros || step_.parameter(p).role != Role::kTrainable)) continue;
      if (never) CKPT_RETURN_IF_ERROR(BeginAtZero(group, p, kinds));
      if (kinds.empty() || !group_step) continue;
      CKPT_RETURN_IF_ERROR(
          AddStep(StatePath(group.recorded.optimizer, p, "step"), p, never ? 0 : *group_step));
    }
    return {};
  }

  Status BeginAtZero(const PlacedGroup& group, ParameterIndex parameter,
                     const StatesByKind& kinds) {
    for (const auto& [kind, like] : kinds) {
      const auto path = StatePath(group.recorded.optimizer, parameter, std::string(kind));
      if (kind == "step") {
        begun_at_zero_.insert(parameter);
        const Atom& counted = step_.atom(like);
        const bool object = traits_.torch_states && IsPythonNumber(counted.source);
        CKPT_RETURN_IF_ERROR(object ? AddNumber(path, counted.dtype, 0)
                                    : AddStep(path, parameter, 0));
        continue;
      }
      Entry& entry = AddTensor(path, step_.atom(like).dtype, step_.parameter(parameter).shape);
      entry.tp_dim = TensorParallelDim(step_.parameter(parameter), entry.shape);
      entry.body = Zeros{};
    }
    return {};
  }

  // Entries of everything that is not a parameter, under their own keys; tensors come first.
  Status AddDocuments() {
    std::unordered_set<std::string> taken;
    for (const Entry& entry : entries_) taken.insert(entry.key);
    std::vector<Entry> found;
    for (const Document& document : step_.documents) {
      const auto path = PathOf(document);
      if (!path) continue;
      auto added = AppendDocument(document, *path, traits_.own_keys, objects_, found);
      if (!added) return Fail(std::move(added).error().WithContext(document.key));
    }
    for (Entry& entry : found) {
      if (!taken.insert(entry.key).second) continue;
      if (const auto* index = std::get_if<AtomIndex>(&entry.body)) {
        entry.tp_dim =
            TensorParallelDim(step_.parameter(step_.atom(*index).parameter), entry.shape);
      }
      entries_.push_back(std::move(entry));
    }
    return {};
  }

  // States that are neither tensors nor numbers, of a DCP source.
  Status AddOtherStates() {
    const Document* document = step_.FindDocument(kSourceStates);
    if (document == nullptr) return {};
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
    for (const auto& [label, parameters] : RootOf(tree).Items()) {
      for (const auto& [name, kinds] : parameters.Items()) {
        const auto parameter = name.String() ? step_.FindParameter(*name.String()) : std::nullopt;
        if (!parameter || !label.String()) continue;
        begun_.insert(*parameter);
        for (const auto& [kind, value] : kinds.Items()) {
          const auto path = StatePath(std::string(*label.String()), *parameter,
                                      std::string(kind.String().value_or("")));
          CKPT_RETURN_IF_ERROR(
              AppendValue(*document, value, path, traits_.own_keys, objects_, entries_));
        }
      }
    }
    return {};
  }

  // Where a document stands; nowhere if it is a matter of the source's own engine, or of
  // one of its ranks.
  std::optional<std::vector<PathStep>> PathOf(const Document& document) const {
    using Path = std::vector<PathStep>;
    std::string_view key = document.key;
    if (!document.scope.empty() || key.starts_with(kOwnDocuments)) return {};
    if (key == "client/universal_checkpoint_info" || key == kSourceStates) return {};
    if (key == kSourceRest) return traits_.own_keys ? std::optional(Path()) : std::nullopt;
    if (key.starts_with(deepspeed::kClientPrefix)) {
      key.remove_prefix(deepspeed::kClientPrefix.size());
      return Path{{std::string(key), {}}};
    }
    if (traits_.engine) {
      const bool shown = key == deepspeed::kGlobalSteps || key == deepspeed::kGlobalSamples ||
                         key == deepspeed::kSkippedSteps || key == deepspeed::kLrScheduler;
      if (!shown) return {};
    }
    if (key.starts_with(kExtraState)) {
      key.remove_prefix(kExtraState.size());
      const bool module = key.empty() || key.ends_with('.');
      return keys_.ModelPath(StrCat(key, module ? "_extra_state" : ""));
    }
    return Path{{std::string(key), {}}};
  }

  Status CheckKeys() const {
    std::unordered_set<std::string_view> seen;
    for (const Entry& entry : entries_) {
      if (!IsUtf8(entry.key)) {
        return Fail(ErrorCode::kUnsupported, StrCat("the key '", entry.key,
                                                    "' is not UTF-8, but texts of a pickle "
                                                    "must be"));
      }
      if (seen.insert(entry.key).second) continue;
      return Fail(ErrorCode::kUnsupported,
                  StrCat("two values would have the key '", entry.key, "'"));
    }
    return {};
  }

  const ShownState& shown_;
  const StepModel& step_;
  const SourceTraits& traits_;
  const KeyShape& keys_;
  ObjectArchives objects_;
  std::set<ParameterIndex> begun_;          // with states that are not atoms
  std::set<ParameterIndex> begun_at_zero_;  // given a step of 0
  std::vector<Entry> entries_;
};

}  // namespace

Result<std::vector<Entry>> EntriesOf(const ShownState& shown, const KeyShape& keys) {
  return Collector(shown, keys).Collect();
}

}  // namespace ckptfs::dcp
