// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/reader.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>
#include <variant>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/joined_names.h"
#include "core/state/model_choice.h"
#include "core/state/model_config.h"
#include "formats/dcp/source_keys.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/unread_files.h"
#include "formats/tools/model_files.h"
#include "formats/tools/step_names.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/source_states.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kShownAsItWas = " (dcp/ alone shows it, as it was)";

std::string WithoutDot(std::string prefix) {
  if (prefix.ends_with('.')) prefix.pop_back();
  return prefix;
}

}  // namespace

Result<StepModel> Reader::Read() && {
  CKPT_ASSIGN_OR_RETURN(StoredState state, StoredState::Read(candidate_, parts_, assembler_));
  if (state.metadata().megatron) {
    return Fail(
        ErrorCode::kUnsupported,
        StrCat(candidate_.Path(),
               ": written by Megatron's dist_checkpointing (torch_dist), whose metadata.json "
               "is not there"));
  }
  for (const Form& form : forms_) {
    CKPT_ASSIGN_OR_RETURN(const bool own, form.is(state));
    if (own) return form.read(candidate_, options_, state, assembler_);
  }
  auto keys = ReadStateKeys(state.metadata(), !options_.weights_only, options_.model);
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
    dict_.other_optimizers = !keys_.unknown.empty();
    CKPT_RETURN_IF_ERROR(AddTensors(state));
    AddStates(state, objects);
    CKPT_RETURN_IF_ERROR(ReadGroups(objects));
    CKPT_RETURN_IF_ERROR(SettleAll(state, objects));
    CKPT_RETURN_IF_ERROR(AddDocuments(objects));
    KeepKeys(state.metadata(), objects);
    return {};
  };
  if (Status done = work(); !done) {
    return Fail(std::move(done).error().WithContext(candidate_.Path()));
  }
  CKPT_RETURN_IF_ERROR(LeaveOutFilesBeside());
  CKPT_RETURN_IF_ERROR(CarryOthers());
  CKPT_RETURN_IF_ERROR(LeaveOutOtherModels());
  FillHeader(objects, state.metadata().dropped_objects + objects.dropped());
  auto model = std::move(assembler_).Finish();
  if (!model) return Fail(std::move(model).error().WithContext(candidate_.Path()));
  return model;
}

// ---- tensors and states -----------------------------------------------------------

Status Reader::AddTensors(const StoredState& state) {
  for (const auto& weight : keys_.weights) {
    if (weight.name.ends_with("flat_param")) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", weight.name,
                         "': a flat parameter of FSDP1 (LOCAL_STATE_DICT), whose "
                         "names and shapes are not saved; save with SHARDED_STATE_DICT"));
    }
    const TensorEntry& tensor = state.metadata().tensors[weight.tensor];
    const auto place = [&state, i = weight.tensor](Assembler&, AtomIndex atom) {
      return state.AddFragments(i, atom);
    };
    dict_.tensors.push_back(
        {weight.name, tensor.dtype, tensor.shape, place, {}, !IsFloat(tensor.dtype)});
  }
  return {};
}

size_t Reader::OptimizerOf(const std::string& label) {
  auto& known = dict_.optimizers;
  const auto found = std::ranges::find(known, label, &StateDict::Optimizer::label);
  const auto number = static_cast<size_t>(found - known.begin());
  if (number == known.size()) {
    std::string key = label;
    if (label.empty() && keys_.optimizers.size() == 1) key = WithoutDot(keys_.optimizers[0]);
    StateDict::Optimizer& added = known.emplace_back();
    added.label = label;
    added.what = label.empty() ? "the optimizer" : StrCat("the optimizer '", label, "'");
    added.shown = kShownAsItWas;
    added.key = std::move(key);
    added.strangers = std::move(keys_.strangers[label]);
  }
  return number;
}

// The dict's states have the numbers of the keys'.
void Reader::AddStates(const StoredState& state, ObjectReader& objects) {
  for (auto& key : keys_.states) {
    StateDict::State added{OptimizerOf(key.optimizer), std::move(key.owner), key.kind};
    const auto scalar = [&objects, &key] { return objects.Scalar(key.entry); };
    if (key.entry.object) {
      added.scalar = scalar;
    } else {
      const TensorEntry& tensor = state.metadata().tensors[key.entry.index];
      added.dtype = tensor.dtype;
      added.shape = tensor.shape;
      if (state.WhyNotPlain(key.entry.index).empty()) {
        added.place = [&state, i = key.entry.index](Assembler&, AtomIndex atom) {
          return state.AddFragments(i, atom);
        };
        if (tensor.shape.empty()) added.scalar = scalar;
      }
    }
    dict_.states.push_back(std::move(added));
  }
}

// ---- groups -----------------------------------------------------------------------

Status Reader::ReadGroups(ObjectReader& objects) {
  std::set<std::string> optimizers;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group) optimizers.insert(one.optimizer);
  }
  for (const std::string& label : optimizers) {
    CKPT_RETURN_IF_ERROR(ReadGroupsOf(label, objects));
  }
  CKPT_RETURN_IF_ERROR(ReadGroupsByParameter(objects));
  NumberOwners();
  for (size_t o = 0; o < dict_.optimizers.size(); ++o) OrderByNumber(o);
  return {};
}

// A live module's name of a weight becomes that of the model's part.
void Reader::NameAsWeight(const std::string& optimizer, std::string& name) {
  if (const auto before = keys_.before.find(optimizer); before != keys_.before.end()) {
    std::string whole = before->second + name;
    if (!weights_.contains(whole)) return;
    keys_.state_names.emplace(whole, name);
    name = std::move(whole);
    return;
  }
  if (weights_.contains(name)) return;
  if (const auto weight = keys_.bare.find(name); weight != keys_.bare.end()) {
    keys_.state_names.emplace(weight->second, name);
    name = weight->second;
    return;
  }
  if (keys_.adapter.empty()) return;
  const auto found = JoinName(name, [&](std::string_view one) { return weights_.contains(one); });
  if (!found || found->part != keys_.adapter) return;
  keys_.state_names.emplace(found->name, name);
  name = found->name;
}

// Says why the members of a group are not names of weights; "" if they are, or are numbers.
std::string Reader::AddMembers(Members members, StateDict::Group& group) {
  for (const uint64_t number : members.numbers) {
    group.members.push_back({"", static_cast<int64_t>(number)});
  }
  std::string stranger;
  for (std::string& name : members.names) {
    NameAsWeight(dict_.optimizers[group.optimizer].label, name);
    if (weights_.contains(name)) continue;
    if (stranger.empty()) stranger = name;
    dict_.optimizers[group.optimizer].strangers.insert(name);
  }
  if (!stranger.empty()) {
    return StrCat("one of its groups has '", stranger, "', which is not a weight");
  }
  for (std::string& name : members.names) {
    if (!grouped_.emplace(group.optimizer, name).second) {
      return StrCat("'", name, "' is in two of its groups");
    }
    group.members.push_back({std::move(name), std::nullopt});
  }
  return "";
}

// An optimizer that was given names keeps them beside its numbers (torch 2.6).
Status Reader::NameNumbers(const ObjectReader::Items& items, StateDict::Group& group,
                           ObjectReader& objects) {
  const auto names = std::ranges::find(items, "param_names", &ObjectReader::Item::key);
  const bool numbered = std::ranges::all_of(
      group.members, [](const auto& member) { return member.number.has_value(); });
  if (names == items.end() || !numbered) return {};
  CKPT_ASSIGN_OR_RETURN(const auto members, objects.MembersOf(names->entry));
  if (!members || members->names.size() != group.members.size()) return {};
  for (size_t i = 0; i < group.members.size(); ++i) group.members[i].name = members->names[i];
  return {};
}

// The planner writes numbers as texts, so a parameter that is called "0" looks like one: an owner
// of digits alone is a name only if the optimizer's groups name it.
void Reader::NumberOwners() {
  std::set<std::pair<size_t, std::string_view>> named;
  for (const StateDict::Group& group : dict_.groups) {
    for (const auto& member : group.members) {
      if (!member.number) named.emplace(group.optimizer, member.name);
    }
  }
  for (StateDict::State& state : dict_.states) {
    const auto* const name = std::get_if<std::string>(&state.owner);
    if (name == nullptr || named.contains({state.optimizer, *name})) continue;
    if (const auto number = MemberNumber(*name)) state.owner = *number;
  }
}

// The groups of an optimizer, or none of them: views tell groups by their place.  Where one is not
// understood, the others tell the order of numbered members all the same.
Status Reader::ReadGroupsOf(const std::string& label, ObjectReader& objects) {
  const size_t optimizer = OptimizerOf(label);
  std::map<uint32_t, ObjectReader::Items> groups;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group && one.optimizer == label)
      groups[*one.group].push_back({one.key, one.entry, one.path});
  }
  std::vector<StateDict::Group> read;
  std::vector<KeyedEntry> others;
  std::string why;
  for (auto& [number, items] : groups) {
    const auto params = std::ranges::find(items, "params", &ObjectReader::Item::key);
    std::string own;
    if (number != read.size() || params == items.end()) {
      own = StrCat("group ", number, " does not say its parameters");
    }
    StateDict::Group& group = read.emplace_back(StateDict::Group{optimizer, "", {}});
    if (params != items.end()) {
      CKPT_ASSIGN_OR_RETURN(auto members, objects.MembersOf(params->entry));
      const std::string odd = members ? AddMembers(*std::move(members), group)
                                      : "'params' of a group is not a list of names";
      if (own.empty()) own = odd;
      CKPT_RETURN_IF_ERROR(NameNumbers(items, group, objects));
    }
    if (why.empty()) why = std::move(own);
    if (!why.empty()) continue;
    std::erase_if(items, [](const auto& item) { return item.key == "params"; });
    CKPT_ASSIGN_OR_RETURN(group.hyper_parameters, objects.HyperParameters(items, others));
  }
  if (why.empty()) {
    for (const KeyedEntry entry : others) odd_hyper_parameters_.emplace_back(optimizer, entry);
  } else {
    dict_.other_optimizers = true;
    for (const auto& one : keys_.hyper_parameters) {
      if (one.group && one.optimizer == label) Carry(one.entry, why, "", objects);
    }
    for (StateDict::Group& group : read) {
      group.hyper_parameters.clear();
      std::erase_if(group.members, [](const auto& member) { return !member.number; });
    }
  }
  std::ranges::move(read, std::back_inserter(dict_.groups));
  return {};
}

// Without groups the numbers of an optimizer's states are its members.
void Reader::OrderByNumber(size_t optimizer) {
  const auto own = [&](const auto& one) { return one.optimizer == optimizer; };
  const auto tells = [&](const auto& group) { return own(group) && !group.members.empty(); };
  if (std::ranges::any_of(dict_.groups, tells)) return;
  std::set<int64_t> numbers;
  for (const StateDict::State& state : dict_.states) {
    const auto* number = std::get_if<int64_t>(&state.owner);
    if (number != nullptr && own(state) && state.shape) numbers.insert(*number);
  }
  if (numbers.empty()) return;
  StateDict::Group& order = dict_.groups.emplace_back(StateDict::Group{optimizer, "", {}});
  for (const int64_t number : numbers) order.members.push_back({"", number});
}

// Flattened: parameters of equal hyper-parameters make a group.
Status Reader::ReadGroupsByParameter(ObjectReader& objects) {
  std::map<std::pair<size_t, std::string>, ObjectReader::Items> by_name;
  std::vector<std::pair<size_t, std::string>> order;
  for (const auto& one : keys_.hyper_parameters) {
    if (one.group) continue;
    auto& items = by_name[{OptimizerOf(one.optimizer), one.parameter}];
    if (items.empty()) order.emplace_back(OptimizerOf(one.optimizer), one.parameter);
    items.push_back({one.key, one.entry});
  }
  std::map<std::pair<size_t, std::string>, size_t> known;  // optimizer, pickle: in the dict's
  for (const auto& at : order) {
    auto& items = by_name[at];
    std::ranges::sort(items, {}, &ObjectReader::Item::key);
    std::vector<KeyedEntry> others;
    CKPT_ASSIGN_OR_RETURN(std::string pickle, objects.HyperParameters(items, others));
    for (const KeyedEntry entry : others) odd_hyper_parameters_.emplace_back(at.first, entry);
    const auto [group, added] = known.try_emplace({at.first, pickle}, dict_.groups.size());
    if (added) dict_.groups.push_back({at.first, std::move(pickle), {}});
    dict_.groups[group->second].members.push_back({at.second, std::nullopt});
  }
  return {};
}

// ---- what is decided --------------------------------------------------------------

Status Reader::SettleAll(const StoredState& state, const ObjectReader& objects) {
  dict_.model = WithoutDot(keys_.model);
  dict_.modules = keys_.other_models;
  CKPT_ASSIGN_OR_RETURN(dict_.sizes, SizesOf({}, options_, candidate_));
  dict_.keep = [&](const StateDict::State& one, const std::string& parameter, auto how) {
    const auto& key = keys_.states[static_cast<size_t>(&one - dict_.states.data())];
    if (how != StateDict::Unplaced::kOpaque) {
      rest_.push_back(key.entry);
      return StateDict::Fate{.kept = true};
    }
    // An optimizer that has not begun (momentum_buffer: None), a list, settings.
    std::string why = key.entry.object ? "" : state.WhyNotPlain(key.entry.index);
    if (!why.empty()) return StateDict::Fate{.why = std::move(why)};
    other_states_.push_back(
        {{{key.optimizer, false}, {parameter, false}, {key.kind, false}}, key.entry});
    return StateDict::Fate{.kept = true, .said = false};
  };
  CKPT_ASSIGN_OR_RETURN(settled_, Settle(dict_, options_, assembler_));
  for (size_t i = 0; i < dict_.tensors.size(); ++i) {
    parameters_.emplace(dict_.tensors[i].name, ParameterIndex{static_cast<uint32_t>(i)});
  }
  CarryUnowned(objects);
  return {};
}

// dcp/ shows states and groups of numbers that nothing proves as they were.
void Reader::CarryUnowned(const ObjectReader& objects) {
  for (size_t i = 0; i < dict_.states.size(); ++i) {
    const auto* number = std::get_if<int64_t>(&dict_.states[i].owner);
    const auto& numbers = settled_.numbers[dict_.states[i].optimizer];
    if (number == nullptr) {
      if (!numbers) rest_.push_back(keys_.states[i].entry);
      continue;
    }
    const auto found = numbers ? numbers->find(*number) : Settled::Numbers::const_iterator();
    const bool owned = numbers && found != numbers->end() && found->second;
    if (!owned) rest_.push_back(keys_.states[i].entry);
  }
  std::set<std::pair<bool, size_t>> carried;
  for (const KeyedEntry& entry : rest_) carried.emplace(entry.object, entry.index);
  for (const auto& one : keys_.hyper_parameters) {
    if (settled_.numbers[OptimizerOf(one.optimizer)]) continue;
    if (carried.emplace(one.entry.object, one.entry.index).second) rest_.push_back(one.entry);
  }
  for (const auto& [optimizer, entry] : odd_hyper_parameters_) {
    if (!settled_.numbers[optimizer]) continue;
    Carry(entry, "it is a hyper-parameter that is not a number, a text or a list of them", "",
          objects);
  }
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

// ---- the rest -----------------------------------------------------------------------

Status Reader::AddDocuments(ObjectReader& objects) {
  StepModel& header = assembler_.header();
  CKPT_ASSIGN_OR_RETURN(auto documents, objects.Documents(keys_.others));
  std::ranges::move(documents, std::back_inserter(header.documents));
  std::vector<ObjectReader::Placed> rest;
  std::set<std::string> in_model;
  for (const KeyedEntry entry : keys_.in_model) {
    in_model.insert(objects.KeyOf(entry));
    rest_.push_back(entry);
  }
  for (const KeyedEntry entry : rest_) rest.push_back({objects.PathOf(entry), entry});
  CKPT_ASSIGN_OR_RETURN(Document of_states, objects.DocumentOf(kSourceStates, other_states_));
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

// Where the state dict had what; a view gives the keys back as they were.
void Reader::KeepKeys(const DcpMetadata& metadata, const ObjectReader& objects) {
  KeyShape& keys = assembler_.header().facts.keys.emplace();
  keys.model = WithoutDot(keys_.model);
  keys.flat = keys_.flat_optimizer;
  for (const std::string& prefix : keys_.optimizers) {
    const std::string key = WithoutDot(prefix);
    if (keys_.optimizers.size() == 1) keys.optimizer = key;
    if (keys_.optimizers.size() > 1) keys.optimizers.emplace(key, key);
  }
  for (const auto& [key, index] : objects.tensor_keys()) {
    const TensorEntry& tensor = metadata.tensors[index];
    const auto elements = ElementCount(tensor.shape);
    if (elements && *elements == 1)
      keys.tensors.emplace(key, std::pair(tensor.dtype, tensor.shape));
  }
  for (size_t o = 0; o < dict_.optimizers.size(); ++o) {
    if (!settled_.numbers[o]) continue;
    for (const auto& [number, tensor] : *settled_.numbers[o]) {
      if (!tensor) continue;
      keys.numbers[dict_.optimizers[o].label].emplace(dict_.tensors[*tensor].name, number);
    }
  }
  for (const auto& state : keys_.states) {
    std::vector<PathStep> path;
    for (const auto& [text, index] : state.path) {
      const auto number = index ? MemberNumber(text) : std::nullopt;
      path.push_back(number ? PathStep{"", static_cast<uint32_t>(*number)} : PathStep{text, {}});
    }
    if (!path.empty() && KeyOf(path) == state.kind) keys.kinds.emplace(state.kind, std::move(path));
  }
  keys.state_names.insert(keys_.state_names.begin(), keys_.state_names.end());
}

// The model files, and what else lies in the step's own directory.
Status Reader::CarryOthers() {
  const auto root = RootBelow(candidate_.root, candidate_.save);
  CKPT_RETURN_IF_ERROR(CarryModelFiles(assembler_, root, candidate_.Prefix()));
  return CarryOwnFiles(assembler_, candidate_);
}

// Optimizers that nothing is read of, and weights that somebody saved there later or made of the
// step: loaders of their form take them.
Status Reader::LeaveOutFilesBeside() {
  const Root& root = *candidate_.root;
  const uint32_t save = assembler_.AddRoot(RootBelow(candidate_.root, candidate_.save));
  int64_t newest = 0;
  for (const PartFiles& part : parts_) {
    const std::string folder = part.directory.empty() ? "" : part.directory + "/";
    const bool shards = !part.shards.empty();
    if (shards && assembler_.HasFile(save, StrCat(candidate_.Prefix(), folder, part.shards[0])))
      return {};  // they are the weights
    const std::string own = JoinPath(candidate_.directory, part.directory);
    CKPT_ASSIGN_OR_RETURN(const auto sealed, StatIfThere(root, JoinPath(own, kMetadataFile)));
    if (sealed) newest = std::max(newest, sealed->stamp.mtime_ns);
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(candidate_.directory));
  std::vector<std::string> names;
  for (const RootEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile) names.push_back(entry.name);
  }
  if (keys_.optimizers.empty() && !options_.weights_only) {
    CKPT_RETURN_IF_ERROR(huggingface::LeaveOutOptimizers(
        root, candidate_.directory, names,
        "torch.distributed.checkpoint saved the weights alone, and nothing is read beside them",
        assembler_.header()));
  }
  const auto weights = huggingface::ChooseWeights(names);
  if (newest == 0 || !weights || !*weights || (*weights)->adapter) return {};
  const std::string& name = (*weights)->file;
  CKPT_ASSIGN_OR_RETURN(const auto other, StatIfThere(root, JoinPath(candidate_.directory, name)));
  if (!other || other->stamp.mtime_ns <= newest) return {};
  LeaveOut(assembler_.header(),
           {LeftOutPart::kModel, StrCat("'", name, "'"),
            "it is newer than .metadata: the step is what torch.distributed.checkpoint saved",
            "move these weights to a directory of their own, and adopt that"});
  return {};
}

// Folders that torch.distributed.checkpoint saved and files of torch that are not the step's.
Status Reader::LeaveOutOtherModels() {
  constexpr std::string_view kOne =
      "a step has one model, and torch.distributed.checkpoint saved this one's";
  const Root& root = *candidate_.root;
  CKPT_ASSIGN_OR_RETURN(const auto numbered, FoldersOfOtherModels(root, candidate_.directory));
  const auto tell = [&](const std::string& folder, std::string_view why) {
    LeaveOut(assembler_.header(),
             {IsOptimizerPart(folder) ? LeftOutPart::kOptimizer : LeftOutPart::kModel,
              StrCat("'", folder, "/'"), std::string(why), "adopt that folder by itself"});
  };
  for (const std::string& folder : numbered) {
    tell(folder, "a step has one model, and this one's is the first");
  }
  std::set<std::string_view> known(numbered.begin(), numbered.end());
  std::set<std::string_view> shards;  // in the step's own directory
  for (const PartFiles& part : parts_) {
    known.insert(part.directory);
    if (part.directory.empty()) shards.insert(part.shards.begin(), part.shards.end());
  }
  CKPT_ASSIGN_OR_RETURN(const auto entries, root.List(candidate_.directory));
  std::vector<std::string> files;
  for (const RootEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile && !shards.contains(entry.name)) files.push_back(entry.name);
    const bool other = entry.kind == EntryKind::kDirectory && !known.contains(entry.name);
    if (!other || StepNumber(entry.name)) continue;
    const auto folder = ListPart(root, JoinPath(candidate_.directory, entry.name));
    if (!folder && IsOfDevice(folder.error())) return Fail(Error(folder.error()));
    if (folder && folder->metadata) tell(entry.name, kOne);
  }
  return huggingface::LeaveOutModels(root, candidate_.directory, files, kOne, assembler_.header());
}

void Reader::FillHeader(const ObjectReader& objects, uint64_t dropped) {
  StepModel& header = assembler_.header();
  header.framework = "dcp";
  header.id = candidate_.id;
  header.iteration = candidate_.iteration;
  if (header.iteration == 0)
    header.iteration = objects.iteration().value_or(settled_.steps.value_or(0));
  for (const auto& [key, why] : objects.left_out()) {
    const bool optimizer = std::ranges::any_of(
        keys_.optimizers, [&](const std::string& prefix) { return key.starts_with(prefix); });
    LeaveOut(header, {optimizer ? LeftOutPart::kOptimizer : LeftOutPart::kDocument,
                      StrCat("the key '", key, "'"), why, ""});
  }
  TrainableModule model{WithoutDot(keys_.model), {}};
  for (const StateDict::Tensor& one : dict_.tensors) {
    model.parameters.push_back({one.name, one.shape});
  }
  for (const TrainableModule& other : keys_.other_models) {
    const std::string why =
        StrCat("the model is ", ModelKeyText(model.key), " (", keys_.why_model, ")");
    // A word alone has told it from a twin.
    if (MayBeTrained(model, other) && AreTwins(model, other)) {
      LeaveOut(header,
               {LeftOutPart::kModel, StrCat(ModelKeyText(other.key), " as a model"),
                StrCat(why, "; dcp/ has it as it was saved"), "--model KEY takes it instead"});
      continue;
    }
    header.notes.push_back(StrCat(why, "; ", ModelKeyText(other.key),
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
