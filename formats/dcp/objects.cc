// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/objects.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/model/step_counts.h"
#include "core/state/ownership.h"
#include "formats/torch/plain_value.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

constexpr size_t kMaxDepth = 64;

// Keys under which training code keeps the number of its step.
constexpr std::array<std::string_view, 7> kIterations = {"train_state.step",
                                                         "step",
                                                         "global_step",
                                                         "iteration",
                                                         "trainer.global_step",
                                                         "trainer_state.global_step",
                                                         "state.timestamp.Timestamp.batch"};

}  // namespace

const std::string& ObjectReader::KeyOf(KeyedEntry entry) const {
  const DcpMetadata& metadata = state_.metadata();
  return entry.object ? metadata.objects[entry.index].name : metadata.tensors[entry.index].name;
}

// Nothing of an object that is not understood, which is left out alone: it breaks a rule of
// pickles, or a bound.  A file that cannot be read, or that changed, is an error.
Result<std::optional<StoredState::Object>> ObjectReader::Open(size_t object) {
  auto opened = state_.OpenObject(object);
  if (opened) return std::optional(*std::move(opened));
  const ErrorCode code = opened.error().code;
  if (code != ErrorCode::kInvalid && code != ErrorCode::kUnsupported)
    return Fail(std::move(opened).error());
  left_out_.emplace(state_.metadata().objects[object].name, std::move(opened).error().message);
  return std::optional<StoredState::Object>();
}

Result<std::string> ObjectReader::HyperParameters(const Items& items,
                                                  std::vector<KeyedEntry>& others) {
  Branch top;
  for (const Item& item : items) {
    Add(top, item.path.empty() ? std::vector<PathElement>{{item.key, false}} : item.path,
        item.entry);
  }
  builder_ = PickleBuilder();
  std::vector<std::pair<NodeId, NodeId>> dict;
  for (const auto& [key, branch] : top.children) {
    std::vector<KeyedEntry> below;
    bool plain = true;
    const MakeValue make = [&](KeyedEntry entry) -> Result<std::optional<NodeId>> {
      below.push_back(entry);
      CKPT_ASSIGN_OR_RETURN(const auto value, BuildPlain(entry));
      plain = plain && value;
      return value;
    };
    CKPT_ASSIGN_OR_RETURN(const auto value, Build(branch, make));
    if (!plain || !value) {
      std::ranges::move(below, std::back_inserter(others));
      continue;
    }
    const NodeId name = builder_.String(key.text);
    dict.emplace_back(name, *value);
  }
  const NodeId root = builder_.Dict(dict);
  return PrintPickle(std::move(builder_).Finish(root));
}

// A value of numbers and texts alone; nothing of another one.
Result<std::optional<NodeId>> ObjectReader::BuildPlain(KeyedEntry entry) {
  const std::optional<NodeId> none;
  if (entry.object) {
    CKPT_ASSIGN_OR_RETURN(const auto object, Open(entry.index));
    const PickleRef root = object ? object->file.root() : PickleRef();
    const TensorNode* tensor = object ? root.Tensor() : nullptr;
    const bool number = tensor != nullptr && tensor->shape.empty();
    if (!object || (!number && !object->file.tree().tensors.empty())) return none;
    return CopyPlain(root, &object->file, builder_);
  }
  const TensorEntry& tensor = state_.metadata().tensors[entry.index];
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
  if (elements != 1 || !state_.Whole(entry.index)) return none;
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, state_.ReadSmall(entry.index));
  const auto value = NumberNode(tensor.dtype, bytes, builder_);
  if (value) tensor_keys_.emplace(tensor.name, entry.index);
  return value;
}

Result<std::optional<Members>> ObjectReader::MembersOf(KeyedEntry entry) {
  const std::optional<Members> none;
  if (!entry.object) return none;
  CKPT_ASSIGN_OR_RETURN(const auto object, Open(entry.index));
  const PickleRef list = object ? object->file.root() : PickleRef();
  if (!list || !list.IsSequence()) return none;
  Members members;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto name = list.at(i).String();
    const auto number = list.at(i).Int();
    if (name) members.names.emplace_back(*name);
    if (number && *number >= 0) members.numbers.push_back(static_cast<uint64_t>(*number));
  }
  const auto number = [](const std::string& name) { return MemberNumber(name).has_value(); };
  if (members.numbers.empty() && std::ranges::all_of(members.names, number)) {
    for (const std::string& name : members.names) {
      members.numbers.push_back(static_cast<uint64_t>(*MemberNumber(name)));
    }
    members.names.clear();
  }
  const size_t most = std::max(members.names.size(), members.numbers.size());
  return most == list.size() ? std::optional(std::move(members)) : none;
}

Result<std::optional<ScalarValue>> ObjectReader::Scalar(KeyedEntry entry) {
  if (entry.object) {
    CKPT_ASSIGN_OR_RETURN(const auto object, Open(entry.index));
    if (!object) return std::optional<ScalarValue>();
    return ScalarOf(object->file.root(), object->file);
  }
  const TensorEntry& tensor = state_.metadata().tensors[entry.index];
  CKPT_ASSIGN_OR_RETURN(std::string bytes, state_.ReadSmall(entry.index));
  return std::optional(ScalarValue{tensor.dtype, tensor.shape, std::move(bytes), false});
}

// ---- documents -------------------------------------------------------------------

std::vector<PathElement> ObjectReader::PathOf(KeyedEntry entry) const {
  const DcpMetadata& metadata = state_.metadata();
  const auto& path =
      entry.object ? metadata.object_paths[entry.index] : metadata.tensor_paths[entry.index];
  if (!path.empty() && path.size() <= kMaxDepth) return path;
  const std::string& key = KeyOf(entry);
  const size_t dot = key.find('.');
  if (dot == std::string::npos) return {{key, false}};
  return {{key.substr(0, dot), false}, {key.substr(dot + 1), false}};
}

// A key that is a value and a dict, as no state dict has it, is left out alone.
void ObjectReader::Add(Branch& top, const std::vector<PathElement>& path, KeyedEntry entry) {
  Branch* at = &top;
  bool taken = false;
  for (const PathElement& element : path) {
    const auto [known, added] =
        at->places.try_emplace({element.text, element.index}, at->children.size());
    if (added) at->children.push_back({element, {}});
    at = &at->children[known->second].branch;
    taken = taken || at->value;
  }
  if (taken || !at->children.empty()) {
    left_out_.emplace(KeyOf(entry), "another key has the same path or lies below it");
  } else {
    at->value = entry;
  }
}

Result<std::vector<Document>> ObjectReader::Documents(const std::vector<KeyedEntry>& entries) {
  Branch top;
  std::map<std::string, size_t> words;
  for (const KeyedEntry entry : entries) {
    const std::vector<PathElement> path = PathOf(entry);
    const auto [word, added] = words.try_emplace(path[0].text, top.children.size());
    if (added) top.children.push_back({path[0], {}});
    Branch& at = top.children[word->second].branch;
    Add(at, {path.begin() + 1, path.end()}, entry);
  }
  std::vector<Document> documents;
  for (const auto& [word, branch] : top.children) {
    const bool scheduler = word.text == "lr_scheduler";
    const std::string key = scheduler ? word.text : StrCat("client/", word.text);
    CKPT_ASSIGN_OR_RETURN(Document made, MakeOne(key, branch));
    if (!made.pickle.empty()) documents.push_back(std::move(made));
  }
  return documents;
}

Result<Document> ObjectReader::DocumentOf(std::string_view key, const std::vector<Placed>& values) {
  if (values.empty()) return Document{};
  Branch top;
  for (const Placed& one : values) Add(top, one.path, one.entry);
  return MakeOne(key, top);
}

// Without a pickle if nothing of it can be kept.
Result<Document> ObjectReader::MakeOne(std::string_view key, const Branch& branch) {
  builder_ = PickleBuilder();
  storages_.clear();
  atoms_.clear();
  CKPT_ASSIGN_OR_RETURN(const auto root,
                        Build(branch, [&](KeyedEntry entry) { return BuildValue(entry); }));
  if (!root) return Document{};
  PickleTree tree = std::move(builder_).Finish(*root);
  CKPT_ASSIGN_OR_RETURN(const TorchFile file,
                        TorchFile::Make(std::move(tree), std::move(storages_)));
  storages_ = {};
  return MakeDocument(std::string(key), "", file.root(), file, BlobIndex{}, atoms_);
}

Result<std::optional<NodeId>> ObjectReader::Build(const Branch& branch, const MakeValue& make) {
  if (branch.value) return make(*branch.value);
  bool list = true;
  std::vector<NodeId> values;
  // A list's tensors were met before its objects.
  std::vector<size_t> order(branch.children.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto element = [&](size_t i) -> const PathElement& { return branch.children[i].key; };
  if (std::ranges::all_of(order, [&](size_t i) { return element(i).index; })) {
    std::ranges::stable_sort(order, {}, [&](size_t i) {
      return std::pair(element(i).text.size(), std::string_view(element(i).text));
    });
  }
  std::vector<std::pair<NodeId, NodeId>> items;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto& [path, child] = branch.children[order[i]];
    list = list && path.index && path.text == std::to_string(i);
    CKPT_ASSIGN_OR_RETURN(const auto value, Build(child, make));
    if (!value) continue;
    values.push_back(*value);
    const NodeId name = builder_.String(path.text);
    items.emplace_back(name, *value);
  }
  if (values.empty() && !branch.children.empty()) return std::optional<NodeId>();
  list = list && values.size() == branch.children.size();
  return std::optional(list ? builder_.List(std::move(values)) : builder_.Dict(items));
}

Result<std::optional<NodeId>> ObjectReader::BuildValue(KeyedEntry entry) {
  return entry.object ? CopyObject(entry.index) : AddTensor(entry.index);
}

// Its storages, each a part of the file that the object lies in.  An object that a document
// cannot have (a sparse tensor, a cycle through a tuple) is left out alone.
Result<std::optional<NodeId>> ObjectReader::CopyObject(size_t object) {
  const std::string& key = state_.metadata().objects[object].name;
  CKPT_ASSIGN_OR_RETURN(const auto opened, Open(object));
  if (!opened) return std::optional<NodeId>();
  const auto& [file, blob] = *opened;
  const PickleRef root = file.root();
  if (auto alone = MakeDocument(key, "", root, file, blob); !alone) {
    left_out_.emplace(key, std::move(alone).error().message);
    return std::optional<NodeId>();
  }
  const std::string prefix = StrCat("object", object, ":");
  for (const TensorNode& tensor : file.tree().tensors) {
    CKPT_ASSIGN_OR_RETURN(const FileTensor located, file.Locate(tensor, blob));
    const uint64_t width = ByteWidth(tensor.dtype);
    storages_.try_emplace(prefix + tensor.storage_key,
                          StorageRecord{located.Stored().offset - tensor.storage_offset * width,
                                        tensor.storage_elements * width, blob});
  }
  CKPT_RETURN_IF_ERROR(TakeIteration(key, [&] { return ScalarOf(root, file); }));
  const auto rename = [&](const TensorNode& tensor) { return prefix + tensor.storage_key; };
  return std::optional(builder_.Copy(root, rename));
}

Status ObjectReader::TakeIteration(const std::string& key, const ReadScalar& read) {
  if (std::ranges::find(kIterations, key) == kIterations.end()) return {};
  CKPT_ASSIGN_OR_RETURN(const auto value, read());
  const auto count = value ? CountOf(value->dtype, value->bytes) : std::nullopt;
  if (count && *count > 0) iteration_ = std::max(iteration_.value_or(0), *count);
  return {};
}

Result<std::optional<NodeId>> ObjectReader::AddTensor(size_t tensor) {
  const TensorEntry& entry = state_.metadata().tensors[tensor];
  const std::optional<NodeId> none;
  if (std::string why = state_.WhyNotPlain(tensor); !why.empty()) {
    left_out_.emplace(entry.name, std::move(why));
    return none;
  }
  TensorNode node;
  node.dtype = entry.dtype;
  node.storage_key = StrCat("tensor", tensor);
  node.shape = entry.shape;
  node.strides = RowMajorStrides(entry.shape);
  CKPT_ASSIGN_OR_RETURN(node.storage_elements, ElementCount(entry.shape));
  const uint64_t width = ByteWidth(entry.dtype);
  if (width == 0) {
    left_out_.emplace(entry.name, "its elements are of less than a byte");
    return none;
  }
  if (beside_.Wants(tensor)) {
    if (!beside_.IsComplete(tensor)) {
      left_out_.emplace(entry.name, "its chunks do not cover it");
      return none;
    }
    const auto atom = beside_.Add(tensor);
    if (!atom && atom.error().code != ErrorCode::kUnsupported) return Fail(Error(atom.error()));
    if (!atom) {  // a key that is not UTF-8
      left_out_.emplace(entry.name, atom.error().message);
      return none;
    }
    atoms_.emplace(node.storage_key, *atom);
    return std::optional(builder_.Tensor(std::move(node)));
  }
  if (entry.shape.empty()) {
    CKPT_RETURN_IF_ERROR(
        TakeIteration(entry.name, [&] { return Scalar({.object = false, .index = tensor}); }));
  }
  const auto stored = state_.Whole(tensor);
  if (state_.HasCopies(tensor)) ++dropped_;
  storages_.try_emplace(node.storage_key,
                        StorageRecord{stored->offset, node.storage_elements * width, stored->blob});
  return std::optional(builder_.Tensor(std::move(node)));
}

}  // namespace ckptfs::dcp
