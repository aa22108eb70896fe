// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/tree_values.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/torch/pickle/tensor_rebuild.h"

namespace ckptfs {

using Kind = PickleNode::Kind;

namespace {

// The bytes that torch.save takes for a value; it rarely takes fewer.
constexpr size_t kBytesOfNode = 8;
constexpr size_t kMaxReserved = size_t{1} << 16;

bool CanHold(Kind kind) { return kind == Kind::kReduce || kind == Kind::kObject; }

}  // namespace

PickleTree PickleTreeValues::Finish(NodeId root) && {
  tree_.root = root;
  return std::move(tree_);
}

Status PickleTreeValues::CheckRoom() const {
  if (tree_.nodes.size() < max_nodes_) return {};
  return Refuse("more than ", max_nodes_, " values");
}

PickleTreeValues::PickleTreeValues(uint64_t pickle_bytes, size_t max_nodes)
    : pickle_bytes_(pickle_bytes), max_nodes_(max_nodes) {
  tree_.nodes.reserve(std::min({pickle_bytes / kBytesOfNode, kMaxReserved, max_nodes}));
}

Result<NodeId> PickleTreeValues::Add(PickleNode node) {
  if (tree_.nodes.size() >= max_nodes_) [[unlikely]]
    CKPT_RETURN_IF_ERROR(CheckRoom());
  tree_.nodes.push_back(std::move(node));
  return static_cast<NodeId>(tree_.nodes.size() - 1);
}

Result<NodeId> PickleTreeValues::Text(Kind kind, std::string_view text) {
  PickleNode node;
  node.kind = kind;
  node.text = text;
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::Shared(NodeId& shared, Kind kind, int64_t integer) {
  if (shared != kNoNode) return shared;
  PickleNode node;
  node.kind = kind;
  node.integer = integer;
  CKPT_ASSIGN_OR_RETURN(shared, Add(std::move(node)));
  return shared;
}

Result<NodeId> PickleTreeValues::Bool(bool value) {
  return value ? Shared(true_, Kind::kBool, 1) : Shared(false_, Kind::kBool, 0);
}

Result<NodeId> PickleTreeValues::Int(int64_t value) {
  PickleNode node;
  node.kind = Kind::kInt;
  node.integer = value;
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::BigInt(std::string_view little_endian) {
  return Text(Kind::kBigInt, little_endian);
}

Result<NodeId> PickleTreeValues::Float(double value) {
  PickleNode node;
  node.kind = Kind::kFloat;
  node.real = value;
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::String(std::string_view text) { return Text(Kind::kString, text); }
Result<NodeId> PickleTreeValues::Bytes(std::string_view text) { return Text(Kind::kBytes, text); }
Result<NodeId> PickleTreeValues::ByteArray(std::string_view text) {
  return Text(Kind::kByteArray, text);
}

Result<NodeId> PickleTreeValues::Tuple(std::span<const NodeId> items) {
  if (items.empty()) return Shared(empty_tuple_, Kind::kTuple);
  PickleNode node;
  node.kind = Kind::kTuple;
  node.children.assign(items.begin(), items.end());
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::FrozenSet(std::span<const NodeId> items) {
  PickleNode node;
  node.kind = Kind::kFrozenSet;
  node.children.assign(items.begin(), items.end());
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::Global(std::string_view module, std::string_view name) {
  return Add(MakeGlobal(module, name));
}

// The size of what calls copy must stay proportional to the pickle.
Status PickleTreeValues::Charge(const PickleNode& node) {
  charged_ +=
      (node.children.size() + tree_.ExtraOf(node).items.size()) * sizeof(NodeId) + node.text.size();
  if (node.kind == Kind::kTensor) {
    const TensorNode& tensor = tree_.TensorOf(node);
    charged_ += sizeof(TensorNode) / 2 + tensor.storage_key.size() + tensor.shape.size();
  }
  if (charged_ > 16 * pickle_bytes_ + (uint64_t{1} << 20)) {
    return Refuse("calls multiply memoised values");
  }
  return {};
}

Result<std::pair<std::string, std::string>> PickleTreeValues::NamesOf(NodeId module, NodeId name) {
  const PickleNode& of = tree_.nodes[module];
  const PickleNode& called = tree_.nodes[name];
  if (of.kind != Kind::kString || called.kind != Kind::kString) {
    return Refuse("the names of a global are not strings");
  }
  PickleNode global = MakeGlobal(of.text, called.text);
  CKPT_RETURN_IF_ERROR(Charge(global));
  return std::pair(of.text, called.text);
}

Result<NodeId> PickleTreeValues::Reduce(NodeId callee, NodeId arguments) {
  if (tree_.nodes[arguments].kind != Kind::kTuple) {
    return Refuse("the arguments of a call are not a tuple");
  }
  CKPT_RETURN_IF_ERROR(CheckRoom());
  auto known = RecogniseReduce(tree_, callee, arguments);
  if (known) {
    CKPT_RETURN_IF_ERROR(Charge(*known));
    return Add(*std::move(known));
  }
  PickleNode node;
  node.kind = Kind::kReduce;
  node.children = {callee, arguments};
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::Object(NodeId cls, NodeId arguments, const NodeId* keywords) {
  if (tree_.nodes[arguments].kind != Kind::kTuple) {
    return Refuse("the arguments of a class are not a tuple");
  }
  PickleNode node;
  node.kind = Kind::kObject;
  node.children = {cls, arguments};
  if (keywords != nullptr) {
    if (tree_.nodes[*keywords].kind != Kind::kDict) {
      return Refuse("the keyword arguments of a class are not a dict");
    }
    node.children.push_back(*keywords);
  }
  return Add(std::move(node));
}

Result<NodeId> PickleTreeValues::Persistent(NodeId id) {
  auto known = RecognisePersistent(tree_, id);
  if (known) {
    CKPT_RETURN_IF_ERROR(Charge(*known));
    return Add(*std::move(known));
  }
  PickleNode node;
  node.kind = Kind::kPersistent;
  node.children = {id};
  return Add(std::move(node));
}

Status PickleTreeValues::Append(NodeId list, std::span<const NodeId> items) {
  const Kind kind = tree_.nodes[list].kind;
  if (kind != Kind::kList && !CanHold(kind)) return Refuse("appends to a value that is not a list");
  auto& to = kind == Kind::kList ? tree_.nodes[list].children : tree_.MakeExtra(list).appended;
  to.insert(to.end(), items.begin(), items.end());
  return {};
}

Status PickleTreeValues::SetItems(NodeId dict, std::span<const NodeId> items) {
  const Kind kind = tree_.nodes[dict].kind;
  if (kind != Kind::kDict && !CanHold(kind))
    return Refuse(
        "sets items of a value that is not a "
        "dict");
  auto& to = kind == Kind::kDict ? tree_.nodes[dict].children : tree_.MakeExtra(dict).items;
  to.insert(to.end(), items.begin(), items.end());
  return {};
}

Status PickleTreeValues::AddItems(NodeId set, std::span<const NodeId> items) {
  PickleNode& node = tree_.nodes[set];
  if (node.kind != Kind::kSet) return Refuse("adds items to a value that is not a set");
  node.children.insert(node.children.end(), items.begin(), items.end());
  return {};
}

Status PickleTreeValues::Build(NodeId object, NodeId state) {
  const Kind kind = tree_.nodes[object].kind;
  if (!CanHold(kind) && kind != Kind::kTensor && kind != Kind::kPersistent) {
    return Refuse("sets the state of a value that is not an object");
  }
  PickleExtra& extra = tree_.MakeExtra(object);
  if (extra.state) return Refuse("sets the state of an object twice");
  extra.state = state;
  return {};
}

}  // namespace ckptfs
