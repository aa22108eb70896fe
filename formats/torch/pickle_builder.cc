// SPDX-License-Identifier: Apache-2.0

#include <unordered_map>

#include "formats/torch/pickle_writer.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

PickleNode Make(Kind kind) {
  PickleNode node;
  node.kind = kind;
  return node;
}

std::vector<NodeId> Flatten(const std::vector<std::pair<NodeId, NodeId>>& items) {
  std::vector<NodeId> flat;
  flat.reserve(items.size() * 2);
  for (auto [key, value] : items) {
    flat.push_back(key);
    flat.push_back(value);
  }
  return flat;
}

}  // namespace

NodeId PickleBuilder::Add(PickleNode node) {
  tree_.nodes.push_back(std::move(node));
  return static_cast<NodeId>(tree_.nodes.size() - 1);
}

NodeId PickleBuilder::None() { return Add(Make(Kind::kNone)); }

NodeId PickleBuilder::Bool(bool value) {
  PickleNode node = Make(Kind::kBool);
  node.integer = value ? 1 : 0;
  return Add(std::move(node));
}

NodeId PickleBuilder::Int(int64_t value) {
  PickleNode node = Make(Kind::kInt);
  node.integer = value;
  return Add(std::move(node));
}

NodeId PickleBuilder::Float(double value) {
  PickleNode node = Make(Kind::kFloat);
  node.real = value;
  return Add(std::move(node));
}

NodeId PickleBuilder::String(std::string_view text) {
  PickleNode node = Make(Kind::kString);
  node.text = text;
  return Add(std::move(node));
}

NodeId PickleBuilder::Tuple(std::vector<NodeId> items) {
  PickleNode node = Make(Kind::kTuple);
  node.children = std::move(items);
  return Add(std::move(node));
}

NodeId PickleBuilder::List(std::vector<NodeId> items) {
  PickleNode node = Make(Kind::kList);
  node.children = std::move(items);
  return Add(std::move(node));
}

NodeId PickleBuilder::Dict(const std::vector<std::pair<NodeId, NodeId>>& items) {
  PickleNode node = Make(Kind::kDict);
  node.children = Flatten(items);
  return Add(std::move(node));
}

NodeId PickleBuilder::Global(std::string_view module, std::string_view name) {
  return Add(MakeGlobal(module, name));
}

NodeId PickleBuilder::Reduce(NodeId callee, NodeId arguments) {
  PickleNode node = Make(Kind::kReduce);
  node.children = {callee, arguments};
  return Add(std::move(node));
}

NodeId PickleBuilder::Object(NodeId cls, NodeId arguments, std::optional<NodeId> state) {
  PickleNode node = Make(Kind::kObject);
  node.children = {cls, arguments};
  NodeId id = Add(std::move(node));
  if (state) tree_.MakeExtra(id).state = state;
  return id;
}

NodeId PickleBuilder::OrderedDict(const std::vector<std::pair<NodeId, NodeId>>& items) {
  NodeId callee = Global("collections", "OrderedDict");
  NodeId id = Reduce(callee, Tuple({}));
  tree_.MakeExtra(id).items = Flatten(items);
  return id;
}

NodeId PickleBuilder::Size(const Shape& shape) {
  std::vector<NodeId> extents;
  for (uint64_t extent : shape) extents.push_back(Int(static_cast<int64_t>(extent)));
  NodeId callee = Global("torch", "Size");
  return Reduce(callee, Tuple({Tuple(std::move(extents))}));
}

NodeId PickleBuilder::Tensor(TensorNode tensor) {
  PickleNode node = Make(Kind::kTensor);
  node.integer = static_cast<int64_t>(tree_.tensors.size());
  tree_.tensors.push_back(std::move(tensor));
  return Add(std::move(node));
}

// Two passes: new ids for all that is reachable, then copies with mapped edges.
NodeId PickleBuilder::Copy(PickleRef value,
                           const std::function<std::string(const TensorNode&)>& rename) {
  const PickleTree& from = value.tree();
  std::unordered_map<NodeId, NodeId> ids;
  std::vector<NodeId> order;
  auto visit = [&](NodeId id) {
    if (ids.emplace(id, static_cast<NodeId>(tree_.nodes.size() + order.size())).second) {
      order.push_back(id);
    }
  };
  visit(value.id());
  for (size_t i = 0; i < order.size(); ++i) {
    const PickleNode& node = from.nodes[order[i]];
    ForEachEdge(node, from.ExtraOf(node), visit);
  }
  for (NodeId id : order) {
    PickleNode node = from.nodes[id];
    PickleExtra extra = from.ExtraOf(node);
    ForEachEdge(node, extra, [&](NodeId& child) { child = ids.at(child); });
    if (node.extra != PickleNode::kNoExtra) {
      node.extra = static_cast<uint32_t>(tree_.extras.size());
      tree_.extras.push_back(std::move(extra));
    }
    if (node.kind == Kind::kTensor) {
      TensorNode tensor = from.TensorOf(node);
      if (rename) tensor.storage_key = rename(tensor);
      node.integer = static_cast<int64_t>(tree_.tensors.size());
      tree_.tensors.push_back(std::move(tensor));
    }
    tree_.nodes.push_back(std::move(node));
  }
  return ids.at(value.id());
}

PickleTree PickleBuilder::Finish(NodeId root) && {
  tree_.root = root;
  return std::move(tree_);
}

}  // namespace ckptfs
