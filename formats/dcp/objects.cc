// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/objects.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/tensor/cast.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

constexpr size_t kMaxDepth = 64;

// Keys under which training code keeps the number of its step.
constexpr std::array<std::string_view, 6> kIterations = {
    "train_state.step", "step", "global_step", "iteration", "trainer.global_step",
    "trainer_state.global_step"};

template <class T>
T As(const std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// A number of these bytes; nothing for a dtype of no number.
std::optional<NodeId> NumberNode(DType dtype, const std::string& bytes, PickleBuilder& builder) {
  switch (dtype) {
    case DType::kF64: return builder.Float(As<double>(bytes));
    case DType::kF32: return builder.Float(static_cast<double>(As<float>(bytes)));
    case DType::kI64: return builder.Int(As<int64_t>(bytes));
    case DType::kI32: return builder.Int(As<int32_t>(bytes));
    case DType::kI16: return builder.Int(As<int16_t>(bytes));
    case DType::kI8: return builder.Int(As<int8_t>(bytes));
    case DType::kU8: return builder.Int(As<uint8_t>(bytes));
    case DType::kBool: return builder.Bool(bytes[0] != 0);
    default: break;
  }
  const CastFunction cast = FindCast(dtype, DType::kF64);
  if (cast == nullptr) return std::nullopt;
  std::string wide(sizeof(double), '\0');
  cast(std::as_bytes(std::span(bytes)).data(), std::as_writable_bytes(std::span(wide)).data(), 1);
  return builder.Float(As<double>(wide));
}

}  // namespace

const std::string& ObjectReader::KeyOf(KeyedEntry entry) const {
  const DcpMetadata& metadata = state_.metadata();
  return entry.object ? metadata.objects[entry.index].name : metadata.tensors[entry.index].name;
}

Result<std::string> ObjectReader::HyperParameters(const Items& items) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> dict;
  for (const auto& [key, entry] : items) {
    std::optional<NodeId> value;
    std::string what = "an object that holds tensors";
    if (entry.object) {
      CKPT_ASSIGN_OR_RETURN(const StoredState::Object object, state_.OpenObject(entry.index));
      const PickleRef root = object.file.root();
      const TensorNode* tensor = root.Tensor();
      if (tensor == nullptr && object.file.tree().tensors.empty()) {
        value = builder.Copy(root);
      } else if (tensor != nullptr && tensor->shape.empty()) {
        CKPT_ASSIGN_OR_RETURN(const auto scalar, ScalarOf(root, object.file));
        if (scalar) value = NumberNode(scalar->dtype, scalar->bytes, builder);
      }
    } else {
      const TensorEntry& tensor = state_.metadata().tensors[entry.index];
      what = StrCat("a tensor of ", DTypeName(tensor.dtype), " ", ShapeToString(tensor.shape));
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
      if (elements == 1) {
        CKPT_ASSIGN_OR_RETURN(const std::string bytes, state_.ReadSmall(entry.index));
        value = NumberNode(tensor.dtype, bytes, builder);
        tensor_keys_.emplace(tensor.name, entry.index);
      }
    }
    if (!value) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", KeyOf(entry), "': a hyper-parameter that is ", what,
                         " and no number, which no view of the optimizer has room for; "
                         "--weights-only takes the weights"));
    }
    const NodeId name = builder.String(key);
    dict.emplace_back(name, *value);
  }
  const NodeId root = builder.Dict(dict);
  return PrintPickle(std::move(builder).Finish(root));
}

Result<std::vector<std::string>> ObjectReader::Names(KeyedEntry entry) {
  std::vector<std::string> names;
  const auto refuse = [&](std::string_view what, ErrorCode code = ErrorCode::kInvalid) {
    return Error{code, StrCat("'", KeyOf(entry), "': ", what)};
  };
  if (!entry.object) return Fail(refuse("a tensor, not a list of names"));
  CKPT_ASSIGN_OR_RETURN(const StoredState::Object object, state_.OpenObject(entry.index));
  const PickleRef list = object.file.root();
  if (!list.IsSequence()) return Fail(refuse("not a list"));
  for (size_t i = 0; i < list.size(); ++i) {
    const auto name = list.at(i).String();
    const auto number = list.at(i).Int();
    if (number && *number >= 0 && static_cast<uint64_t>(*number) < order_.size()) {
      names.push_back(order_[static_cast<size_t>(*number)]);
      continue;
    }
    if (!name && number) {
      return Fail(refuse("the optimizer numbers its parameters (optimizer.state_dict(), not "
                         "get_optimizer_state_dict), and nothing tells which parameter has which "
                         "number", ErrorCode::kUnsupported)
                      .Needing("--parameter-order says it, --weights-only takes the weights"));
    }
    if (!name) return Fail(refuse("not a list of names"));
    names.emplace_back(*name);
  }
  return names;
}

Result<std::optional<ScalarValue>> ObjectReader::Scalar(KeyedEntry entry) {
  if (entry.object) {
    CKPT_ASSIGN_OR_RETURN(const StoredState::Object object, state_.OpenObject(entry.index));
    return ScalarOf(object.file.root(), object.file);
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

Result<std::vector<Document>> ObjectReader::Documents(const std::vector<KeyedEntry>& entries) {
  Branch top;
  std::map<std::string, size_t> words;
  for (const KeyedEntry entry : entries) {
    const std::vector<PathElement> path = PathOf(entry);
    const auto [word, added] = words.try_emplace(path[0].text, top.children.size());
    if (added) top.children.push_back({path[0], {}});
    Branch* at = &top.children[word->second].branch;
    for (size_t i = 1; i < path.size(); ++i) {
      auto& children = at->children;
      // Keys of one dict stand together, so the last is the likely one.
      auto found = std::find_if(children.rbegin(), children.rend(),
                                [&](const auto& child) { return child.key == path[i]; });
      if (found == children.rend()) {
        children.push_back({path[i], {}});
        found = children.rbegin();
      }
      at = &found->branch;
    }
    if (at->value || !at->children.empty()) {
      return Refuse("'", KeyOf(entry), "' is a value and a dict, or there twice");
    }
    at->value = entry;
  }
  std::vector<Document> documents;
  for (const auto& [word, branch] : top.children) {
    auto made = MakeOne(word.text, branch);
    if (!made && made.error().code == ErrorCode::kUnsupported) {
      left_out_.insert(word.text);
      continue;
    }
    if (!made) return Fail(std::move(made).error());
    if (!made->pickle.empty()) documents.push_back(*std::move(made));
  }
  return documents;
}

// Without a pickle if nothing of it can be kept.
Result<Document> ObjectReader::MakeOne(const std::string& word, const Branch& branch) {
  builder_ = PickleBuilder();
  storages_.clear();
  CKPT_ASSIGN_OR_RETURN(const auto root, Build(branch));
  if (!root) return Document{};
  PickleTree tree = std::move(builder_).Finish(*root);
  CKPT_ASSIGN_OR_RETURN(const TorchFile file,
                        TorchFile::Make(std::move(tree), std::move(storages_)));
  storages_ = {};
  const std::string key = word == "lr_scheduler" ? word : StrCat("client/", word);
  return MakeDocument(key, "", file.root(), file, BlobIndex{});
}

Result<std::optional<NodeId>> ObjectReader::Build(const Branch& branch) {
  if (branch.value) {
    if (!branch.children.empty()) {
      return Refuse("'", KeyOf(*branch.value), "' is a value and a dict");
    }
    return BuildValue(*branch.value);
  }
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
    CKPT_ASSIGN_OR_RETURN(const auto value, Build(child));
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
  if (entry.object) {
    CKPT_ASSIGN_OR_RETURN(const NodeId node, CopyObject(entry.index));
    return std::optional(node);
  }
  const auto node = AddTensor(entry.index);
  if (!node) left_out_.insert(KeyOf(entry));
  return node;
}

// Its storages, each a part of the file that the object lies in.
Result<NodeId> ObjectReader::CopyObject(size_t object) {
  CKPT_ASSIGN_OR_RETURN(const StoredState::Object opened, state_.OpenObject(object));
  const std::string prefix = StrCat("object", object, ":");
  for (const TensorNode& tensor : opened.file.tree().tensors) {
    auto located = opened.file.Locate(tensor, opened.blob);
    if (!located) {
      return Fail(std::move(located).error().WithContext(
          StrCat("'", state_.metadata().objects[object].name, "'")));
    }
    const uint64_t width = ByteWidth(tensor.dtype);
    storages_.try_emplace(
        prefix + tensor.storage_key,
        StorageRecord{located->Stored().offset - tensor.storage_offset * width,
                      tensor.storage_elements * width, opened.blob});
  }
  const PickleRef root = opened.file.root();
  const auto number = root.Int();
  const std::string& key = state_.metadata().objects[object].name;
  if (number && *number > 0 && std::ranges::find(kIterations, key) != kIterations.end()) {
    iteration_ = std::max(iteration_.value_or(0), static_cast<uint64_t>(*number));
  }
  return builder_.Copy(root, [&](const TensorNode& tensor) { return prefix + tensor.storage_key; });
}

std::optional<NodeId> ObjectReader::AddTensor(size_t tensor) {
  const auto stored = state_.Whole(tensor);
  if (stored && state_.HasCopies(tensor)) ++dropped_;
  const auto elements = stored ? ElementCount(stored->shape) : Result<uint64_t>(0);
  if (!stored || !elements || ByteWidth(stored->dtype) == 0) return std::nullopt;
  TensorNode node;
  node.dtype = stored->dtype;
  node.storage_key = StrCat("tensor", tensor);
  node.storage_elements = *elements;
  node.shape = stored->shape;
  node.strides = stored->strides;
  storages_.try_emplace(node.storage_key,
                        StorageRecord{stored->offset, *elements * ByteWidth(stored->dtype),
                                      stored->blob});
  return builder_.Tensor(std::move(node));
}

}  // namespace ckptfs::dcp
