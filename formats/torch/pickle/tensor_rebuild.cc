// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/tensor_rebuild.h"

#include <limits>

#include "formats/torch/pickle/storage_types.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

constexpr size_t kMaxGlobalName = 1024;  // of a nested class; longer chains stay calls

std::optional<uint64_t> Unsigned(const PickleNode& node) {
  if (node.kind != Kind::kInt || node.integer < 0) return std::nullopt;
  return static_cast<uint64_t>(node.integer);
}

// An empty OrderedDict or None: what torch writes for hooks.
bool NoHooks(const PickleTree& tree, NodeId id) {
  const PickleNode& node = tree.nodes[id];
  if (node.kind == Kind::kNone) return true;
  return node.kind == Kind::kReduce && node.extra == PickleNode::kNoExtra &&
         IsGlobal(tree.nodes[node.children[0]], "collections", "OrderedDict");
}

std::optional<std::vector<uint64_t>> Extents(const PickleTree& tree, NodeId id) {
  const PickleNode* node = &tree.nodes[id];
  if (node->kind == Kind::kReduce && IsGlobal(tree.nodes[node->children[0]], "torch", "Size")) {
    const PickleNode& arguments = tree.nodes[node->children[1]];
    if (arguments.kind != Kind::kTuple || arguments.children.size() != 1) return std::nullopt;
    node = &tree.nodes[arguments.children[0]];
  }
  if (node->kind != Kind::kTuple || node->children.size() > kMaxDimensions) return std::nullopt;
  std::vector<uint64_t> extents;
  for (NodeId child : node->children) {
    auto value = Unsigned(tree.nodes[child]);
    if (!value) return std::nullopt;
    extents.push_back(*value);
  }
  return extents;
}

PickleNode TensorResult(PickleTree& tree, TensorNode tensor) {
  PickleNode node;
  node.kind = Kind::kTensor;
  node.integer = static_cast<int64_t>(tree.tensors.size());
  tree.tensors.push_back(std::move(tensor));
  return node;
}

const TensorNode* AsStorage(const PickleTree& tree, NodeId id) {
  const PickleNode& node = tree.nodes[id];
  if (node.kind != Kind::kTensor || node.extra != PickleNode::kNoExtra) return nullptr;
  const TensorNode& tensor = tree.TensorOf(node);
  return tensor.form == TensorNode::Form::kStorage ? &tensor : nullptr;
}

// The tensor arguments that a rebuild function takes: (storage, offset, size,
// stride[, requires_grad, hooks[, dtype]]).
enum class Rebuild { kV1, kV2, kV3 };

std::optional<Rebuild> RebuildOf(const PickleNode& callee) {
  if (IsGlobal(callee, "torch._utils", "_rebuild_tensor_v2")) return Rebuild::kV2;
  if (IsGlobal(callee, "torch._utils", "_rebuild_tensor_v3")) return Rebuild::kV3;
  if (IsGlobal(callee, "torch._utils", "_rebuild_tensor")) return Rebuild::kV1;
  return std::nullopt;
}

// The dtype, and the storage's elements in it.
bool SetDType(const PickleTree& tree, Rebuild rebuild, const std::vector<NodeId>& arguments,
              const TensorNode& storage, TensorNode& tensor) {
  if (rebuild != Rebuild::kV3) {
    auto type = FindStorageType(storage.storage_class);
    if (!type || !type->plain) return false;
    tensor.dtype = storage.dtype;
    tensor.storage_elements = storage.storage_elements;
    return true;
  }
  const PickleNode& name = tree.nodes[arguments[6]];
  if (name.kind != Kind::kGlobal || GlobalModule(name) != "torch") return false;
  auto dtype = DTypeFromTorch(GlobalName(name));
  if (!dtype || ByteWidth(*dtype) == 0) return false;
  uint64_t width = ByteWidth(storage.dtype);
  if (storage.storage_elements > std::numeric_limits<uint64_t>::max() / width) return false;
  tensor.dtype = *dtype;
  tensor.storage_elements = storage.storage_elements * width / ByteWidth(*dtype);
  return storage.storage_offset == 0 || storage.dtype == *dtype;
}

std::optional<TensorNode> RebuildTensor(const PickleTree& tree, NodeId callee, NodeId arguments) {
  auto rebuild = RebuildOf(tree.nodes[callee]);
  const PickleNode& tuple = tree.nodes[arguments];
  if (!rebuild || tuple.kind != Kind::kTuple) return std::nullopt;
  const std::vector<NodeId>& args = tuple.children;
  // A last argument more is tensor metadata (conj and neg bits): stays opaque.
  size_t wanted = *rebuild == Rebuild::kV1 ? 4 : *rebuild == Rebuild::kV2 ? 6 : 7;
  if (args.size() != wanted) return std::nullopt;
  const TensorNode* storage = AsStorage(tree, args[0]);
  auto offset = Unsigned(tree.nodes[args[1]]);
  auto shape = Extents(tree, args[2]);
  auto strides = Extents(tree, args[3]);
  if (!storage || !offset || !shape || !strides || shape->size() != strides->size()) {
    return std::nullopt;
  }
  TensorNode tensor;
  if (!SetDType(tree, *rebuild, args, *storage, tensor)) return std::nullopt;
  if (*rebuild != Rebuild::kV1) {
    const PickleNode& grad = tree.nodes[args[4]];
    if (grad.kind != Kind::kBool || !NoHooks(tree, args[5])) return std::nullopt;
    tensor.requires_grad = grad.integer != 0;
  }
  if (*offset > std::numeric_limits<uint64_t>::max() - storage->storage_offset) return std::nullopt;
  tensor.storage_key = storage->storage_key;
  tensor.storage_offset = storage->storage_offset + *offset;
  tensor.shape = *std::move(shape);
  tensor.strides = *std::move(strides);
  return tensor;
}

// _rebuild_parameter(data, requires_grad, hooks).
std::optional<PickleNode> RebuildParameter(PickleTree& tree, const PickleNode& arguments) {
  if (arguments.kind != Kind::kTuple || arguments.children.size() != 3) return std::nullopt;
  const PickleNode& data = tree.nodes[arguments.children[0]];
  const PickleNode& grad = tree.nodes[arguments.children[1]];
  if (data.kind != Kind::kTensor || data.extra != PickleNode::kNoExtra ||
      grad.kind != Kind::kBool || !NoHooks(tree, arguments.children[2])) {
    return std::nullopt;
  }
  TensorNode tensor = tree.TensorOf(data);
  if (tensor.form != TensorNode::Form::kTensor || tensor.is_parameter) return std::nullopt;
  tensor.is_parameter = true;
  tensor.requires_grad = grad.integer != 0;
  return TensorResult(tree, std::move(tensor));
}

// _rebuild_from_type_v2(function, type, arguments, state): stays a kReduce, but
// its third argument becomes a kTensor of form kArguments.
std::optional<PickleNode> RebuildFromType(PickleTree& tree, NodeId callee, NodeId arguments) {
  if (tree.nodes[arguments].kind != Kind::kTuple) return std::nullopt;
  std::vector<NodeId> args = tree.nodes[arguments].children;
  if (args.size() != 4) return std::nullopt;
  auto tensor = RebuildTensor(tree, args[0], args[2]);
  if (!tensor) return std::nullopt;
  tensor->form = TensorNode::Form::kArguments;
  tree.nodes.push_back(TensorResult(tree, *std::move(tensor)));
  args[2] = static_cast<NodeId>(tree.nodes.size() - 1);
  PickleNode tuple;
  tuple.kind = Kind::kTuple;
  tuple.children = std::move(args);
  tree.nodes.push_back(std::move(tuple));
  PickleNode node;
  node.kind = Kind::kReduce;
  node.children = {callee, static_cast<NodeId>(tree.nodes.size() - 1)};
  return node;
}

// Code points below 256 of UTF-8 text as bytes (_codecs.encode(text, 'latin1')).
std::optional<std::string> Latin1(std::string_view utf8) {
  std::string bytes;
  for (size_t i = 0; i < utf8.size(); ++i) {
    unsigned char c = static_cast<unsigned char>(utf8[i]);
    if (c >= 0x80) {
      if (c > 0xc3 || i + 1 == utf8.size()) return std::nullopt;
      c = static_cast<unsigned char>(((c & 3) << 6) |
                                     (static_cast<unsigned char>(utf8[++i]) & 0x3f));
    }
    bytes += static_cast<char>(c);
  }
  return bytes;
}

std::optional<PickleNode> EncodedBytes(const PickleTree& tree, const PickleNode& arguments) {
  if (arguments.children.size() != 2) return std::nullopt;
  const PickleNode& text = tree.nodes[arguments.children[0]];
  const PickleNode& codec = tree.nodes[arguments.children[1]];
  if (text.kind != Kind::kString || codec.kind != Kind::kString ||
      (codec.text != "latin1" && codec.text != "latin-1")) {
    return std::nullopt;
  }
  auto bytes = Latin1(text.text);
  if (!bytes) return std::nullopt;
  PickleNode node;
  node.kind = Kind::kBytes;
  node.text = *std::move(bytes);
  return node;
}

// copyreg.__newobj_ex__(cls, arguments, keywords), as protocols below 4 say NEWOBJ_EX.
std::optional<PickleNode> NewObjectEx(const PickleTree& tree, const PickleNode& arguments) {
  const auto& args = arguments.children;
  if (args.size() != 3 || tree.nodes[args[1]].kind != Kind::kTuple ||
      tree.nodes[args[2]].kind != Kind::kDict) {
    return std::nullopt;
  }
  PickleNode node;
  node.kind = Kind::kObject;
  node.children = args;
  return node;
}

// Key, value, ... of what a dict is called with: another dict or a sequence of pairs.
std::optional<std::vector<NodeId>> ItemsToBe(const PickleTree& tree, const PickleNode& arguments) {
  if (arguments.children.size() != 1) return std::nullopt;
  const PickleNode& source = tree.nodes[arguments.children[0]];
  if (source.kind == Kind::kDict) return source.children;
  if (source.kind != Kind::kList && source.kind != Kind::kTuple) return std::nullopt;
  std::vector<NodeId> items;
  for (NodeId id : source.children) {
    const PickleNode& pair = tree.nodes[id];
    const bool two =
        (pair.kind == Kind::kTuple || pair.kind == Kind::kList) && pair.children.size() == 2;
    if (!two) return std::nullopt;
    items.insert(items.end(), pair.children.begin(), pair.children.end());
  }
  return items;
}

// OrderedDict([(key, value), ...]) and Counter({...}), as calls without
// arguments that have items.
std::optional<PickleNode> DictCall(PickleTree& tree, NodeId callee, NodeId arguments) {
  auto items = ItemsToBe(tree, tree.nodes[arguments]);
  if (!items) return std::nullopt;
  PickleNode tuple;
  tuple.kind = Kind::kTuple;
  tree.nodes.push_back(std::move(tuple));
  PickleNode node;
  node.kind = Kind::kReduce;
  node.children = {callee, static_cast<NodeId>(tree.nodes.size() - 1)};
  node.extra = static_cast<uint32_t>(tree.extras.size());
  tree.extras.push_back({.items = *std::move(items)});
  return node;
}

// set, frozenset, bytes, bytearray, dict and getattr as protocol 2 calls them.
std::optional<PickleNode> BuiltinCall(const PickleTree& tree, std::string_view name,
                                      const PickleNode& arguments) {
  const auto& args = arguments.children;
  PickleNode node;
  if (name == "dict") {
    auto items = ItemsToBe(tree, arguments);
    if (!items && !args.empty()) return std::nullopt;
    node.kind = Kind::kDict;
    if (items) node.children = *std::move(items);
    return node;
  }
  if (name == "set" || name == "frozenset") {
    node.kind = name == "set" ? Kind::kSet : Kind::kFrozenSet;
    if (args.size() > 1) return std::nullopt;
    if (args.empty()) return node;
    const PickleNode& list = tree.nodes[args[0]];
    if (list.kind != Kind::kList && list.kind != Kind::kTuple) return std::nullopt;
    node.children = list.children;
    return node;
  }
  if (name == "bytes" || name == "bytearray") {
    node.kind = name == "bytes" ? Kind::kBytes : Kind::kByteArray;
    if (args.size() > 1) return std::nullopt;
    if (args.empty()) return node;
    if (tree.nodes[args[0]].kind != Kind::kBytes) return std::nullopt;
    node.text = tree.nodes[args[0]].text;
    return node;
  }
  if (name == "getattr" && args.size() == 2 && tree.nodes[args[0]].kind == Kind::kGlobal &&
      tree.nodes[args[1]].kind == Kind::kString) {
    const std::string& attribute = tree.nodes[args[1]].text;
    if (attribute.find('\n') != std::string::npos) return std::nullopt;
    if (tree.nodes[args[0]].text.size() + attribute.size() > kMaxGlobalName) return std::nullopt;
    node.kind = Kind::kGlobal;
    node.text = tree.nodes[args[0]].text + "." + attribute;
    return node;
  }
  return std::nullopt;
}

}  // namespace

std::optional<PickleNode> RecogniseReduce(PickleTree& tree, NodeId callee, NodeId arguments) {
  const PickleNode& global = tree.nodes[callee];
  const PickleNode& tuple = tree.nodes[arguments];
  if (global.kind != Kind::kGlobal || tuple.kind != Kind::kTuple) return std::nullopt;
  if (RebuildOf(global)) {
    auto tensor = RebuildTensor(tree, callee, arguments);
    if (!tensor) return std::nullopt;
    return TensorResult(tree, *std::move(tensor));
  }
  if (IsGlobal(global, "torch._utils", "_rebuild_parameter")) return RebuildParameter(tree, tuple);
  if (IsGlobal(global, "torch._tensor", "_rebuild_from_type_v2")) {
    return RebuildFromType(tree, callee, arguments);
  }
  if (IsGlobal(global, "collections", "OrderedDict") ||
      IsGlobal(global, "collections", "Counter")) {
    return DictCall(tree, callee, arguments);
  }
  if (IsGlobal(global, "_codecs", "encode")) return EncodedBytes(tree, tuple);
  if (IsGlobal(global, "copyreg", "__newobj_ex__")) return NewObjectEx(tree, tuple);
  if (GlobalModule(global) == "builtins") return BuiltinCall(tree, GlobalName(global), tuple);
  return std::nullopt;
}

std::optional<PickleNode> RecognisePersistent(PickleTree& tree, NodeId id) {
  const PickleNode& tuple = tree.nodes[id];
  if (tuple.kind != Kind::kTuple || tuple.children.size() < 2) return std::nullopt;
  auto arg = [&](size_t i) -> const PickleNode& { return tree.nodes[tuple.children[i]]; };
  if (arg(0).kind != Kind::kString || arg(1).kind != Kind::kGlobal) return std::nullopt;
  if (arg(0).text == "module" && tuple.children.size() == 4) return arg(1);
  if (arg(0).text != "storage" || tuple.children.size() < 5 || tuple.children.size() > 6) {
    return std::nullopt;
  }
  auto type = FindStorageType(GlobalName(arg(1)));
  auto elements = Unsigned(arg(4));
  if (!type || !elements || !arg(1).text.starts_with("torch") || arg(2).kind != Kind::kString) {
    return std::nullopt;
  }
  TensorNode storage;
  storage.form = TensorNode::Form::kStorage;
  storage.storage_class = type->name;
  storage.dtype = type->dtype;
  storage.storage_key = arg(2).text;
  storage.storage_elements = *elements;
  storage.shape = {*elements};
  storage.strides = {1};
  if (tuple.children.size() == 6 && arg(5).kind != Kind::kNone) {  // a view of a root storage
    const PickleNode& view = arg(5);
    if (view.kind != Kind::kTuple || view.children.size() != 3) return std::nullopt;
    auto offset = Unsigned(tree.nodes[view.children[1]]);
    auto length = Unsigned(tree.nodes[view.children[2]]);
    if (!offset || !length) return std::nullopt;
    storage.storage_offset = *offset;
    storage.shape = {*length};
  }
  return TensorResult(tree, std::move(storage));
}

}  // namespace ckptfs
