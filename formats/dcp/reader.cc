// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/joined_names.h"
#include "core/state/model_choice.h"
#include "core/state/model_config.h"
#include "core/state/roles.h"
#include "core/state/state_fit.h"
#include "formats/dcp/numbered.h"
#include "formats/dcp/source_keys.h"
#include "formats/sharding/placer.h"
#include "formats/sharding/sharding.h"
#include "formats/tools/model_files.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/source_states.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::dcp {
namespace {

std::optional<uint64_t> WholeNumber(const ScalarValue& value) {
  double number = -1;
  if (value.dtype == DType::kF32) {
    float single;
    std::memcpy(&single, value.bytes.data(), sizeof(single));
    number = static_cast<double>(single);
  } else if (value.dtype == DType::kF64) {
    std::memcpy(&number, value.bytes.data(), sizeof(number));
  } else if (value.dtype == DType::kI64) {
    int64_t integer;
    std::memcpy(&integer, value.bytes.data(), sizeof(integer));
    number = static_cast<double>(integer);
  }
  const bool whole = number >= 0 && number < 1e15 && number == std::floor(number);
  return whole ? std::optional(static_cast<uint64_t>(number)) : std::nullopt;
}

// Optimizers' numbers of their parameters, as nodes of dicts.
std::vector<std::pair<NodeId, NodeId>> NumberNodes(
    const std::map<std::string, std::map<std::string, uint64_t>>& numbers, PickleBuilder& builder) {
  std::vector<std::pair<NodeId, NodeId>> nodes;
  for (const auto& [label, of_optimizer] : numbers) {
    std::vector<std::pair<NodeId, NodeId>> items;
    for (const auto& [name, number] : of_optimizer) {
      const NodeId text = builder.String(name);
      items.emplace_back(text, builder.Int(static_cast<int64_t>(number)));
    }
    const NodeId text = builder.String(label);
    nodes.emplace_back(text, builder.Dict(items));
  }
  return nodes;
}

constexpr std::string_view kShownAsItWas = " (dcp/ alone shows it, as it was)";

}  // namespace

Result<StepModel> Reader::Read() && {
  CKPT_ASSIGN_OR_RETURN(StoredState state, StoredState::Read(candidate_, parts_, assembler_));
  auto keys = Keys(state);
  if (!keys) return Fail(std::move(keys).error().WithContext(candidate_.Path()));
  keys_ = *std::move(keys);
  for (const auto& weight : keys_.weights) weights_.insert(weight.name);
  if (keys_.weights.empty()) {
    return Refuse(candidate_.Path(), ": it does not hold the weights of a model");
  }
  BesideTensors beside(state, assembler_, parameters_);
  ObjectReader objects(state, beside);
  const auto work = [&]() -> Status {
    for (const auto& one : keys_.unknown) Carry(one.entry, one.why, one.remedy, objects);
    unknown_optimizer_ = !keys_.unknown.empty();
    CKPT_RETURN_IF_ERROR(ReadGroups(objects));
    CKPT_RETURN_IF_ERROR(DeclareParameters(state));
    CKPT_RETURN_IF_ERROR(AddStates(state, objects));
    CKPT_RETURN_IF_ERROR(AddGroups());
    CKPT_RETURN_IF_ERROR(AddDocuments(objects));
    return KeepKeys(state.metadata(), objects);
  };
  if (Status done = work(); !done) {
    return Fail(std::move(done).error().WithContext(candidate_.Path()));
  }
  CKPT_RETURN_IF_ERROR(CarryOthers());
  FillHeader(objects, state.metadata().dropped_objects + objects.dropped());
  auto model = std::move(assembler_).Finish();
  if (!model) return Fail(std::move(model).error().WithContext(candidate_.Path()));
  return model;
}

// An optimizer that numbers its parameters has names if something proves whose they are; else
// dcp/ alone shows it, by its numbers.
Result<StateKeys> Reader::Keys(StoredState& state) {
  const DcpMetadata& metadata = state.metadata();
  const auto read = [&](bool optimizers) {
    return ReadStateKeys(metadata, optimizers, order_, options_.model);
  };
  if (options_.weights_only || !MayBeNumbered(metadata)) return read(!options_.weights_only);
  CKPT_ASSIGN_OR_RETURN(StateKeys keys, read(false));
  const auto numbers_of = [&](KeyedEntry entry) -> Result<std::vector<uint64_t>> {
    CKPT_ASSIGN_OR_RETURN(const StoredState::Object object, state.OpenObject(entry.index));
    std::vector<uint64_t> numbers;
    const PickleRef list = object.file.root();
    for (size_t i = 0; list.IsSequence() && i < list.size(); ++i) {
      const auto number = list.at(i).Int();
      if (number && *number >= 0) numbers.push_back(static_cast<uint64_t>(*number));
    }
    return numbers;
  };
  CKPT_ASSIGN_OR_RETURN(NumberedOwners owners,
                        OwnersOfNumbers(metadata, keys, options_.parameter_order, numbers_of));
  order_ = std::move(owners.order);
  if (!owners.why.empty()) {
    LeaveOut(assembler_.header(), {LeftOutPart::kOptimizer, "the optimizer",
                                   StrCat(owners.why, kShownAsItWas), std::move(owners.remedy)});
  }
  return read(true);
}

// ---- parameters -------------------------------------------------------------------

// DCP does not say it.
Role Reader::RoleOfWeight(const std::string& name, const TensorEntry& tensor) const {
  const bool nobody_knows = trained_.empty() || unknown_optimizer_;
  const Trained trained = trained_.contains(name) ? Trained::kYes
                          : nobody_knows          ? Trained::kUnknown
                                                  : Trained::kNo;
  return RoleOf(name, tensor.dtype, tensor.shape, trained,
                [&](std::string_view other) { return weights_.contains(other); });
}

Status Reader::DeclareParameters(StoredState& state) {
  const auto& tensors = state.metadata().tensors;
  std::vector<NamedLocals> locals;
  for (const auto& weight : keys_.weights) {
    if (weight.name.ends_with("flat_param")) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", weight.name,
                         "': a flat parameter of FSDP1 (LOCAL_STATE_DICT), whose "
                         "names and shapes are not saved; save with SHARDED_STATE_DICT"));
    }
    locals.emplace_back(weight.name, std::vector<Shape>{tensors[weight.tensor].shape});
  }
  CKPT_ASSIGN_OR_RETURN(const ModelSizes sizes, SizesOf({}, options_, candidate_));
  CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                        ShardingRules::Make(nullptr, options_, std::move(locals), sizes));
  for (const auto& weight : keys_.weights) {
    const TensorEntry& tensor = tensors[weight.tensor];
    const Role role = RoleOfWeight(weight.name, tensor);
    CKPT_ASSIGN_OR_RETURN(auto sharding,
                          rules.Resolve(weight.name, {&tensor.shape, 1}, role == Role::kBuffer));
    if (!IsFloat(tensor.dtype) && sharding->pattern.kind == PatternKind::kShard) {
      sharding->pattern = Pattern{};
    }
    Parameter parameter = ParameterOf(weight.name, role, *sharding);
    parameter.shape = tensor.shape;
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                          assembler_.AddParameter(std::move(parameter)));
    parameters_.emplace(weight.name, index);
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(index, "", "weight", tensor.dtype, tensor.shape));
    CKPT_RETURN_IF_ERROR(state.AddFragments(weight.tensor, atom));
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
    if (IsFloat(tensor.dtype)) elements_[tensor.dtype] += elements;
  }
  rules.Describe(assembler_.header());
  return {};
}

// ---- the optimizer ------------------------------------------------------------------

Status Reader::AddStates(StoredState& state, ObjectReader& objects) {
  std::set<std::tuple<std::string_view, std::string_view, std::string_view>> known;
  for (const auto& key : keys_.states) {
    if (!known.emplace(key.optimizer, key.parameter, key.kind).second) {
      Carry(key.entry, StrCat("'", key.parameter, "' has two states '", key.kind, "'"), "",
            objects);
      continue;
    }
    CKPT_RETURN_IF_ERROR(AddState(state, objects, key));
  }
  return {};
}

Status Reader::AddState(StoredState& state, ObjectReader& objects, const StateKeys::State& key) {
  const ParameterIndex parameter = parameters_.find(key.parameter)->second;
  const TensorEntry* tensor =
      key.entry.object ? nullptr : &state.metadata().tensors[key.entry.index];
  if (IsOurs(key.kind)) {
    Carry(key.entry, "ckptfs itself calls something else so", "", objects);
    return {};
  }
  if (std::string why = tensor == nullptr ? "" : state.WhyNotPlain(key.entry.index); !why.empty()) {
    LeaveOut(
        assembler_.header(),
        {LeftOutPart::kOptimizer,
         StrCat("optimizer state '", key.kind, "' of '", key.parameter, "'"), std::move(why), ""});
    return {};
  }
  const bool scalar = tensor == nullptr || (tensor->shape.empty() && key.kind == "step");
  const Shape& whole = assembler_.parameter(parameter).shape;
  if (scalar || (tensor->shape.empty() && !whole.empty())) {
    CKPT_ASSIGN_OR_RETURN(const auto value, objects.Scalar(key.entry));
    if (!value) {  // an optimizer that has not begun (momentum_buffer: None), a list, settings
      other_states_.push_back(&key);
      return {};
    }
    if (key.kind == "step") {
      if (const auto steps = WholeNumber(*value)) steps_ = std::max(steps_.value_or(0), *steps);
    }
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(parameter, key.optimizer, key.kind, value->dtype,
                                             value->shape, Relation::kScalar));
    return assembler_.SetInline(atom, value->bytes, value->python_number);
  }
  CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                        assembler_.AddAtom(parameter, key.optimizer, key.kind, tensor->dtype,
                                           tensor->shape, RelationOf(tensor->shape, whole)));
  return state.AddFragments(key.entry.index, atom);
}

Status Reader::ReadGroups(ObjectReader& objects) {
  CKPT_RETURN_IF_ERROR(ReadNumberedGroups(objects));
  for (const auto& state : keys_.states) {
    trained_.insert(state.parameter);
    if (state.number) numbers_[state.optimizer].emplace(state.parameter, *state.number);
  }
  CKPT_RETURN_IF_ERROR(ReadGroupsByParameter(objects));
  for (const NamedGroup& group : groups_) trained_.insert(group.names.begin(), group.names.end());
  return {};
}

// A value of an optimizer that no other view knows; dcp/ shows it under the key that it had.
void Reader::Carry(KeyedEntry entry, std::string_view why, std::string_view remedy,
                   const ObjectReader& objects) {
  rest_.push_back(entry);
  if (why == kNumbersParameters) return;  // said of the whole optimizer
  LeaveOut(assembler_.header(),
           {LeftOutPart::kOptimizer, StrCat("the key '", objects.KeyOf(entry), "'"),
            StrCat(why, kShownAsItWas), std::string(remedy)});
}

Status Reader::ReadNumberedGroups(ObjectReader& objects) {
  std::set<std::string> optimizers;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group) optimizers.insert(one.optimizer);
  }
  for (const std::string& optimizer : optimizers) {
    CKPT_RETURN_IF_ERROR(ReadGroupsOf(optimizer, objects));
  }
  return {};
}

// Why the members of a group are not names of weights; empty if they are now.
std::string Reader::WhyNotNames(const std::string& optimizer, Members& members) {
  if (!members.numbers.empty() && order_.empty()) return std::string(kNumbersParameters);
  for (const uint64_t number : members.numbers) {
    if (number >= order_.size()) return StrCat("nothing names parameter ", number);
    members.names.push_back(order_[number]);
    numbers_[optimizer].emplace(order_[number], number);
  }
  for (std::string& name : members.names) {
    NameAsWeight(name);
    if (!weights_.contains(name)) {
      return StrCat("one of its groups has '", name, "', which is not a weight");
    }
    if (!grouped_.emplace(optimizer, name).second) {
      return StrCat("'", name, "' is in two of its groups");
    }
  }
  return "";
}

// The groups of an optimizer, or none of them: views tell groups by their place.
Status Reader::ReadGroupsOf(const std::string& optimizer, ObjectReader& objects) {
  std::map<uint32_t, ObjectReader::Items> groups;
  for (const auto& one : keys_.hyper_parameters) {
    if (!one.group || one.optimizer != optimizer) continue;
    groups[*one.group].emplace_back(one.key, one.entry);
  }
  std::vector<NamedGroup> read;
  std::vector<KeyedEntry> others;
  std::string why;
  for (auto& [number, items] : groups) {
    const auto params = std::ranges::find(items, "params", &ObjectReader::Items::value_type::first);
    if (number != read.size() || params == items.end()) {
      why = StrCat("group ", number, " does not say its parameters");
      break;
    }
    CKPT_ASSIGN_OR_RETURN(auto members, objects.MembersOf(params->second));
    why = members ? WhyNotNames(optimizer, *members) : "'params' of a group is not a list of names";
    if (!why.empty()) break;
    ObjectReader::Items values = items;
    std::erase_if(values, [](const auto& item) { return item.first == "params"; });
    CKPT_ASSIGN_OR_RETURN(std::string pickle, objects.HyperParameters(values, others));
    read.push_back({optimizer, std::move(pickle), std::move(members->names)});
  }
  if (why.empty()) {
    std::ranges::move(read, std::back_inserter(groups_));
    CarryHyperParameters(others, objects);
    return {};
  }
  unknown_optimizer_ = true;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group && one.optimizer == optimizer) {
      Carry(one.entry, why, "", objects);
    }
  }
  return {};
}

// A live module's name of a weight becomes that of the model's part.
void Reader::NameAsWeight(std::string& name) {
  if (keys_.adapter.empty() || weights_.contains(name)) return;
  const auto found = JoinName(name, [&](std::string_view one) { return weights_.contains(one); });
  if (!found || found->part != keys_.adapter) return;
  keys_.state_names.emplace(found->name, name);
  name = found->name;
}

// Flattened: parameters of equal hyper-parameters make a group.
Status Reader::ReadGroupsByParameter(ObjectReader& objects) {
  std::map<std::pair<std::string, std::string>, ObjectReader::Items> by_name;
  std::vector<std::pair<std::string, std::string>> order;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group) continue;
    auto& items = by_name[{one.optimizer, one.parameter}];
    if (items.empty()) order.emplace_back(one.optimizer, one.parameter);
    items.emplace_back(one.key, one.entry);
  }
  std::map<std::pair<std::string, std::string>, size_t> known;  // optimizer, pickle: in groups_
  std::vector<KeyedEntry> others;
  for (const auto& at : order) {
    auto& items = by_name[at];
    std::ranges::sort(items, {}, &ObjectReader::Items::value_type::first);
    CKPT_ASSIGN_OR_RETURN(std::string pickle, objects.HyperParameters(items, others));
    const auto [group, added] = known.try_emplace({at.first, pickle}, groups_.size());
    if (added) groups_.push_back({at.first, std::move(pickle), {}});
    groups_[group->second].names.push_back(at.second);
  }
  CarryHyperParameters(others, objects);
  return {};
}

void Reader::CarryHyperParameters(const std::vector<KeyedEntry>& others,
                                  const ObjectReader& objects) {
  for (const KeyedEntry entry : others) {
    Carry(entry, "it is a hyper-parameter that is not a number, a text or a list of them", "",
          objects);
  }
}

Status Reader::AddGroups() {
  for (const NamedGroup& group : groups_) {
    Group out{group.optimizer, {}, group.hyper_parameters};
    for (const std::string& name : group.names) {
      const auto parameter = parameters_.find(name);
      CKPT_CHECK(parameter != parameters_.end());
      out.parameters.push_back(parameter->second);
    }
    assembler_.AddGroup(std::move(out));
  }
  return {};
}

// ---- the rest -----------------------------------------------------------------------

Status Reader::AddDocuments(ObjectReader& objects) {
  StepModel& header = assembler_.header();
  CKPT_ASSIGN_OR_RETURN(auto documents, objects.Documents(keys_.others));
  std::ranges::move(documents, std::back_inserter(header.documents));
  std::vector<ObjectReader::Placed> states;
  for (const StateKeys::State* state : other_states_) {
    states.push_back({{{state->optimizer, false}, {state->parameter, false}, {state->kind, false}},
                      state->entry});
  }
  std::vector<ObjectReader::Placed> rest;
  std::set<std::string> in_model;
  for (const KeyedEntry entry : keys_.in_model) {
    in_model.insert(objects.KeyOf(entry));
    rest_.push_back(entry);
  }
  for (const KeyedEntry entry : rest_) rest.push_back({objects.PathOf(entry), entry});
  CKPT_ASSIGN_OR_RETURN(Document of_states, objects.DocumentOf(kSourceStates, states));
  CKPT_ASSIGN_OR_RETURN(Document of_rest, objects.DocumentOf(kSourceRest, rest));
  for (Document* document : {&of_states, &of_rest}) {
    if (!document->pickle.empty()) header.documents.push_back(std::move(*document));
  }
  if (!in_model.empty()) {
    header.notes.push_back(StrCat(in_model.size(), " entries of the module (", *in_model.begin(),
                                  in_model.size() > 1 ? ", ...)" : ")",
                                  " are not tensors: dcp/ alone shows them"));
  }
  return {};
}

Status Reader::KeepKeys(const DcpMetadata& metadata, const ObjectReader& objects) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> tensors;
  for (const auto& [key, index] : objects.tensor_keys()) {
    const TensorEntry& tensor = metadata.tensors[index];
    const NodeId name = builder.String(key);
    const NodeId dtype = builder.String(DTypeName(tensor.dtype));
    tensors.emplace_back(name, builder.Tuple({dtype, builder.Size(tensor.shape)}));
  }
  std::set<std::string_view> told;
  std::vector<std::pair<NodeId, NodeId>> kinds;
  for (const auto& state : keys_.states) {
    if (state.path.empty() || !told.insert(state.kind).second) continue;
    std::vector<NodeId> path;
    for (const auto& [text, index] : state.path) {
      path.push_back(index ? builder.Int(std::stoll(text)) : builder.String(text));
    }
    const NodeId kind = builder.String(state.kind);
    kinds.emplace_back(kind, builder.List(std::move(path)));
  }
  const auto list = [&](const auto& texts) {
    std::vector<NodeId> nodes;
    for (const std::string& text : texts) nodes.push_back(builder.String(text));
    return builder.List(std::move(nodes));
  };
  std::vector<std::pair<NodeId, NodeId>> keys;
  const auto add = [&](std::string_view key, NodeId value) {
    keys.emplace_back(builder.String(key), value);
  };
  add("model", builder.String(keys_.model));
  add("optimizers", list(keys_.optimizers));
  add("flat", builder.Bool(keys_.flat_optimizer));
  add("tensors", builder.Dict(tensors));
  const auto numbers = NumberNodes(numbers_, builder);
  if (!numbers.empty()) add("numbers", builder.Dict(numbers));
  if (!kinds.empty()) add("kinds", builder.Dict(kinds));
  if (!keys_.state_names.empty()) {
    std::vector<std::pair<NodeId, NodeId>> names;
    for (const auto& [name, state] : keys_.state_names) {
      const NodeId text = builder.String(name);
      names.emplace_back(text, builder.String(state));
    }
    add("state_names", builder.Dict(names));
  }
  const NodeId root = builder.Dict(keys);
  CKPT_ASSIGN_OR_RETURN(std::string pickle, PrintPickle(std::move(builder).Finish(root)));
  assembler_.header().documents.push_back(
      {.key = std::string(kSourceKeys), .scope = "", .pickle = std::move(pickle), .tensors = {}});
  return {};
}

// The model files, and what else lies in the step's own directory.
Status Reader::CarryOthers() {
  const auto root = RootBelow(candidate_.root, candidate_.save);
  CKPT_RETURN_IF_ERROR(CarryModelFiles(assembler_, root, candidate_.Prefix()));
  return CarryOwnFiles(assembler_, candidate_);
}

void Reader::FillHeader(const ObjectReader& objects, uint64_t dropped) {
  StepModel& header = assembler_.header();
  header.framework = "dcp";
  header.id = candidate_.id;
  header.iteration = candidate_.iteration;
  if (header.iteration == 0) header.iteration = objects.iteration().value_or(steps_.value_or(0));
  header.model_dtype = MostCommon(elements_, std::nullopt);
  for (const auto& [key, why] : objects.left_out()) {
    LeaveOut(header, {LeftOutPart::kDocument, StrCat("the key '", key, "'"), why, ""});
  }
  for (const TrainableModule& other : keys_.other_models) {
    header.notes.push_back(StrCat("the model is ",
                                  ModelKeyText(keys_.model.substr(0, keys_.model.rfind('.'))), " (",
                                  keys_.why_model, "); ", ModelKeyText(other.key),
                                  " looks like a model, too: --model KEY takes it instead"));
  }
  if (dropped > 0) {
    header.notes.push_back(StrCat(dropped,
                                  " values of ranks that saved by themselves have a "
                                  "name that another rank uses, too: the first is kept"));
  }
  const bool unsized = std::ranges::any_of(
      parts_, [](const PartFiles& part) { return !part.shards.empty() && !part.metadata; });
  if (unsized) {
    header.notes.push_back(
        "these safetensors shards do not say how large tensors are: each is taken to end with "
        "the last shard that is there, as torch reads them");
  }
}

}  // namespace ckptfs::dcp
