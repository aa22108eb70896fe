// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle_value.h"

#include <algorithm>

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

bool IsCall(const PickleNode& node) {
  return node.kind == Kind::kReduce || node.kind == Kind::kObject;
}

bool IsCallOf(const PickleTree& tree, const PickleNode& node, std::string_view module,
              std::string_view name) {
  if (!IsCall(node)) return false;
  const PickleNode& callee = tree.nodes[node.children[0]];
  return callee.kind == Kind::kGlobal && callee.text == module && callee.text2 == name;
}

// The tuple or list inside torch.Size((...)).
const PickleNode* SequenceOf(const PickleTree& tree, const PickleNode& node) {
  if (node.kind == Kind::kList || node.kind == Kind::kTuple) return &node;
  if (node.kind != Kind::kReduce || !IsCallOf(tree, node, "torch", "Size")) return nullptr;
  const PickleNode& arguments = tree.nodes[node.children[1]];
  if (arguments.kind != Kind::kTuple || arguments.children.size() != 1) return nullptr;
  const PickleNode& inner = tree.nodes[arguments.children[0]];
  return inner.kind == Kind::kTuple || inner.kind == Kind::kList ? &inner : nullptr;
}

// Key, value, ... of a dict or of an object with items.
const std::vector<NodeId>* ItemsOf(const PickleNode& node) {
  if (node.kind == Kind::kDict) return &node.children;
  return IsCall(node) ? &node.items : nullptr;
}

}  // namespace

bool PickleRef::IsNone() const { return tree_ != nullptr && node().kind == Kind::kNone; }

bool PickleRef::IsDict() const {
  if (tree_ == nullptr) return false;
  if (node().kind == Kind::kDict) return true;
  if (!IsCall(node())) return false;
  return !node().items.empty() || IsCallOf(*tree_, node(), "collections", "OrderedDict") ||
         IsCallOf(*tree_, node(), "collections", "defaultdict") ||
         IsCallOf(*tree_, node(), "collections", "Counter");
}

bool PickleRef::IsSequence() const {
  return tree_ != nullptr && SequenceOf(*tree_, node()) != nullptr;
}

std::optional<int64_t> PickleRef::Int() const {
  if (tree_ == nullptr) return std::nullopt;
  if (node().kind == Kind::kInt) return node().integer;
  if (node().kind != Kind::kReduce) return std::nullopt;
  const PickleNode& arguments = tree_->nodes[node().children[1]];
  if (arguments.kind != Kind::kTuple || arguments.children.size() != 1) return std::nullopt;
  const PickleNode& value = tree_->nodes[arguments.children[0]];
  if (tree_->nodes[node().children[0]].kind != Kind::kGlobal || value.kind != Kind::kInt) {
    return std::nullopt;
  }
  return value.integer;
}

std::optional<bool> PickleRef::Bool() const {
  if (tree_ == nullptr || node().kind != Kind::kBool) return std::nullopt;
  return node().integer != 0;
}

std::optional<double> PickleRef::Number() const {
  if (tree_ == nullptr) return std::nullopt;
  if (node().kind == Kind::kFloat) return node().real;
  if (node().kind == Kind::kInt) return static_cast<double>(node().integer);
  return std::nullopt;
}

std::optional<std::string_view> PickleRef::String() const {
  if (tree_ == nullptr || node().kind != Kind::kString) return std::nullopt;
  return node().text;
}

const TensorNode* PickleRef::Tensor() const {
  if (tree_ == nullptr) return nullptr;
  const PickleNode* found = &node();
  if (found->kind == Kind::kReduce) {
    const PickleNode& arguments = tree_->nodes[found->children[1]];
    size_t inner = arguments.children.size();
    if (IsCallOf(*tree_, *found, "torch._tensor", "_rebuild_from_type_v2")) inner = 2;
    if (IsCallOf(*tree_, *found, "torch._utils", "_rebuild_parameter_with_state")) inner = 0;
    if (arguments.kind != Kind::kTuple || inner >= arguments.children.size()) return nullptr;
    found = &tree_->nodes[arguments.children[inner]];
  }
  if (found->kind != Kind::kTensor) return nullptr;
  const TensorNode& tensor = tree_->tensors[static_cast<size_t>(found->integer)];
  return tensor.form == TensorNode::Form::kStorage ? nullptr : &tensor;
}

std::optional<Shape> PickleRef::AsShape() const {
  const PickleNode* sequence = tree_ == nullptr ? nullptr : SequenceOf(*tree_, node());
  if (sequence == nullptr || sequence->children.size() > kMaxDimensions) return std::nullopt;
  Shape shape;
  for (NodeId child : sequence->children) {
    const PickleNode& value = tree_->nodes[child];
    if (value.kind != Kind::kInt || value.integer < 0) return std::nullopt;
    shape.push_back(static_cast<uint64_t>(value.integer));
  }
  return shape;
}

std::string PickleRef::ClassName() const {
  if (tree_ == nullptr) return {};
  const PickleNode* named = &node();
  if (IsCall(*named)) {
    const PickleNode& callee = tree_->nodes[named->children[0]];
    const PickleNode& arguments = tree_->nodes[named->children[1]];
    // copyreg.__newobj__(cls, ...), __newobj_ex__ and _reconstructor(cls, base, state).
    bool wrapped = callee.kind == Kind::kGlobal && callee.text == "copyreg" &&
                   arguments.kind == Kind::kTuple && !arguments.children.empty();
    named = wrapped ? &tree_->nodes[arguments.children[0]] : &callee;
  }
  return named->kind == Kind::kGlobal ? named->text + "." + named->text2 : std::string();
}

size_t PickleRef::size() const {
  if (tree_ == nullptr) return 0;
  if (const PickleNode* sequence = SequenceOf(*tree_, node())) return sequence->children.size();
  if (node().kind == Kind::kSet || node().kind == Kind::kFrozenSet) return node().children.size();
  const std::vector<NodeId>* items = ItemsOf(node());
  return items == nullptr ? 0 : items->size() / 2;
}

PickleRef PickleRef::at(size_t i) const {
  if (tree_ == nullptr) return {};
  const PickleNode* sequence = SequenceOf(*tree_, node());
  if (sequence == nullptr && (node().kind == Kind::kSet || node().kind == Kind::kFrozenSet)) {
    sequence = &node();
  }
  if (sequence == nullptr || i >= sequence->children.size()) return {};
  return PickleRef(tree_, sequence->children[i]);
}

PickleRef PickleRef::operator[](std::string_view key) const {
  if (tree_ == nullptr) return {};
  if (const std::vector<NodeId>* items = ItemsOf(node())) {
    for (size_t i = items->size(); i >= 2; i -= 2) {  // the last of equal keys wins
      const PickleNode& name = tree_->nodes[(*items)[i - 2]];
      if (name.kind == Kind::kString && name.text == key) return PickleRef(tree_, (*items)[i - 1]);
    }
  }
  if (!node().state || node().kind == Kind::kTensor) return {};
  // Attributes: a dict, or (dict or None, slots).
  const PickleNode& state = tree_->nodes[*node().state];
  if (state.kind == Kind::kDict) return PickleRef(tree_, *node().state)[key];
  if (state.kind != Kind::kTuple || state.children.size() != 2) return {};
  for (NodeId part : state.children) {
    if (tree_->nodes[part].kind != Kind::kDict) continue;
    if (PickleRef found = PickleRef(tree_, part)[key]) return found;
  }
  return {};
}

PickleRef PickleRef::AtInt(int64_t key) const {
  const std::vector<NodeId>* items = tree_ == nullptr ? nullptr : ItemsOf(node());
  if (items == nullptr) return {};
  for (size_t i = items->size(); i >= 2; i -= 2) {
    const PickleNode& name = tree_->nodes[(*items)[i - 2]];
    if (name.kind == Kind::kInt && name.integer == key) return PickleRef(tree_, (*items)[i - 1]);
  }
  return {};
}

std::vector<std::pair<PickleRef, PickleRef>> PickleRef::Items() const {
  std::vector<std::pair<PickleRef, PickleRef>> result;
  const std::vector<NodeId>* items = tree_ == nullptr ? nullptr : ItemsOf(node());
  for (size_t i = 0; items != nullptr && i + 1 < items->size(); i += 2) {
    result.emplace_back(PickleRef(tree_, (*items)[i]), PickleRef(tree_, (*items)[i + 1]));
  }
  return result;
}

PickleRef PickleRef::State() const {
  return tree_ != nullptr && node().state ? PickleRef(tree_, *node().state) : PickleRef();
}

PickleRef PickleRef::Arguments() const {
  return tree_ != nullptr && IsCall(node()) ? PickleRef(tree_, node().children[1]) : PickleRef();
}

}  // namespace ckptfs
