// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle_value.h"

#include <algorithm>
#include <set>
#include <variant>

#include "formats/torch/numpy_number.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

bool IsCall(const PickleNode& node) {
  return node.kind == Kind::kReduce || node.kind == Kind::kObject;
}

bool IsCallOf(const PickleTree& tree, const PickleNode& node, std::string_view module,
              std::string_view name) {
  return IsCall(node) && IsGlobal(tree.nodes[node.children[0]], module, name);
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
const std::vector<NodeId>* ItemsOf(const PickleTree& tree, const PickleNode& node) {
  if (node.kind == Kind::kDict) return &node.children;
  return IsCall(node) ? &tree.ExtraOf(node).items : nullptr;
}

}  // namespace

const PickleExtra& PickleTree::ExtraOf(const PickleNode& node) const {
  static const PickleExtra empty;
  return node.extra == PickleNode::kNoExtra ? empty : extras[node.extra];
}

PickleExtra& PickleTree::MakeExtra(NodeId id) {
  PickleNode& node = nodes[id];
  if (node.extra == PickleNode::kNoExtra) {
    node.extra = static_cast<uint32_t>(extras.size());
    extras.emplace_back();
  }
  return extras[node.extra];
}

std::string_view GlobalModule(const PickleNode& global) {
  return std::string_view(global.text).substr(0, global.text.find('\n'));
}

std::string_view GlobalName(const PickleNode& global) {
  return std::string_view(global.text).substr(global.text.find('\n') + 1);
}

bool IsGlobal(const PickleNode& node, std::string_view module, std::string_view name) {
  return node.kind == Kind::kGlobal && GlobalModule(node) == module && GlobalName(node) == name;
}

PickleNode MakeGlobal(std::string_view module, std::string_view name) {
  PickleNode node;
  node.kind = Kind::kGlobal;
  node.text.reserve(module.size() + 1 + name.size());
  node.text.append(module).append(1, '\n').append(name);
  return node;
}

bool PickleRef::IsNone() const { return tree_ != nullptr && node().kind == Kind::kNone; }

bool PickleRef::IsDict() const {
  if (tree_ == nullptr) return false;
  if (node().kind == Kind::kDict) return true;
  if (!IsCall(node())) return false;
  // The arguments of a dict's call are among its items already, or cannot be told.
  const size_t arguments = tree_->nodes[node().children[1]].children.size();
  for (const std::string_view name : {"OrderedDict", "Counter", "defaultdict"}) {
    if (!IsCallOf(*tree_, node(), "collections", name)) continue;
    return arguments <= (name == "defaultdict" ? 1u : 0u);
  }
  return !tree_->ExtraOf(node()).items.empty();
}

bool PickleRef::IsSequence() const {
  return tree_ != nullptr && SequenceOf(*tree_, node()) != nullptr;
}

std::optional<int64_t> PickleRef::Int() const {
  if (tree_ == nullptr) return std::nullopt;
  if (node().kind == Kind::kInt) return node().integer;
  const auto number = NumpyNumberOf(*tree_, node());
  const int64_t* const value = number ? std::get_if<int64_t>(&*number) : nullptr;
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<bool> PickleRef::Bool() const {
  if (tree_ == nullptr) return std::nullopt;
  if (node().kind == Kind::kBool) return node().integer != 0;
  const auto number = NumpyNumberOf(*tree_, node());
  const bool* const value = number ? std::get_if<bool>(&*number) : nullptr;
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<double> PickleRef::Number() const {
  if (tree_ == nullptr) return std::nullopt;
  if (node().kind == Kind::kFloat) return node().real;
  if (const auto whole = Int()) return static_cast<double>(*whole);
  const auto number = NumpyNumberOf(*tree_, node());
  const double* const value = number ? std::get_if<double>(&*number) : nullptr;
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::optional<std::string_view> PickleRef::String() const {
  if (tree_ == nullptr || node().kind != Kind::kString) return std::nullopt;
  return node().text;
}

const TensorNode* PickleRef::Tensor() const {
  if (tree_ == nullptr) return nullptr;
  const PickleNode* found = &node();
  if (found->kind == Kind::kReduce) {
    // A state or items set on the call could be anything: torch's __setstate__ moves the tensor.
    const PickleNode& arguments = tree_->nodes[found->children[1]];
    size_t inner = arguments.children.size();
    if (IsCallOf(*tree_, *found, "torch._tensor", "_rebuild_from_type_v2")) inner = 2;
    if (IsCallOf(*tree_, *found, "torch._utils", "_rebuild_parameter_with_state")) inner = 0;
    if (found->extra != PickleNode::kNoExtra || arguments.kind != Kind::kTuple ||
        inner >= arguments.children.size()) {
      return nullptr;
    }
    found = &tree_->nodes[arguments.children[inner]];
  }
  if (found->kind != Kind::kTensor || found->extra != PickleNode::kNoExtra) return nullptr;
  const TensorNode& tensor = tree_->TensorOf(*found);
  return tensor.form == TensorNode::Form::kStorage ? nullptr : &tensor;
}

bool PickleRef::IsOtherTensor() const {
  if (tree_ == nullptr || Tensor() != nullptr) return false;
  if (node().kind == Kind::kTensor) return true;
  if (!IsCall(node())) return false;
  const PickleNode& callee = tree_->nodes[node().children[0]];
  const bool torch = callee.kind == Kind::kGlobal && GlobalModule(callee).starts_with("torch");
  return torch && GlobalName(callee).starts_with("_rebuild");
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
    bool wrapped = callee.kind == Kind::kGlobal && GlobalModule(callee) == "copyreg" &&
                   arguments.kind == Kind::kTuple && !arguments.children.empty();
    named = wrapped ? &tree_->nodes[arguments.children[0]] : &callee;
  }
  if (named->kind != Kind::kGlobal) return {};
  std::string name = named->text;
  name[name.find('\n')] = '.';
  return name;
}

size_t PickleRef::size() const {
  if (tree_ == nullptr) return 0;
  if (const PickleNode* sequence = SequenceOf(*tree_, node())) return sequence->children.size();
  if (node().kind == Kind::kSet || node().kind == Kind::kFrozenSet) return node().children.size();
  const std::vector<NodeId>* items = ItemsOf(*tree_, node());
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
  if (const std::vector<NodeId>* items = ItemsOf(*tree_, node())) {
    for (size_t i = items->size(); i >= 2; i -= 2) {  // the last of equal keys wins
      const PickleNode& name = tree_->nodes[(*items)[i - 2]];
      if (name.kind == Kind::kString && name.text == key) return PickleRef(tree_, (*items)[i - 1]);
    }
  }
  PickleRef attributes = State();  // a dict, or (dict or None, slots)
  if (!attributes || node().kind == Kind::kTensor) return {};
  const PickleNode& state = attributes.node();
  if (state.kind == Kind::kDict) return attributes[key];
  if (state.kind != Kind::kTuple || state.children.size() != 2) return {};
  for (NodeId part : state.children) {
    if (tree_->nodes[part].kind != Kind::kDict) continue;
    if (PickleRef found = PickleRef(tree_, part)[key]) return found;
  }
  return {};
}

PickleRef PickleRef::AtInt(int64_t key) const {
  const std::vector<NodeId>* items = tree_ == nullptr ? nullptr : ItemsOf(*tree_, node());
  if (items == nullptr) return {};
  for (size_t i = items->size(); i >= 2; i -= 2) {
    const PickleNode& name = tree_->nodes[(*items)[i - 2]];
    if (name.kind == Kind::kInt && name.integer == key) return PickleRef(tree_, (*items)[i - 1]);
  }
  return {};
}

std::vector<std::pair<PickleRef, PickleRef>> PickleRef::Items() const {
  std::vector<std::pair<PickleRef, PickleRef>> result;
  const std::vector<NodeId>* items = tree_ == nullptr ? nullptr : ItemsOf(*tree_, node());
  for (size_t i = 0; items != nullptr && i + 1 < items->size(); i += 2) {
    result.emplace_back(PickleRef(tree_, (*items)[i]), PickleRef(tree_, (*items)[i + 1]));
  }
  return result;
}

PickleRef PickleRef::State() const {
  if (tree_ == nullptr) return {};
  const std::optional<NodeId>& state = tree_->ExtraOf(node()).state;
  return state ? PickleRef(tree_, *state) : PickleRef();
}

PickleRef PickleRef::Arguments() const {
  return tree_ != nullptr && IsCall(node()) ? PickleRef(tree_, node().children[1]) : PickleRef();
}

bool AnyNode(PickleRef value, const std::function<bool(const PickleNode&)>& condition) {
  std::vector<NodeId> work = {value.id()};
  std::set<NodeId> seen;
  while (!work.empty()) {
    const NodeId id = work.back();
    work.pop_back();
    if (!seen.insert(id).second) continue;
    const PickleNode& node = value.tree().nodes[id];
    if (condition(node)) return true;
    ForEachEdge(node, value.tree().ExtraOf(node), [&](NodeId child) { work.push_back(child); });
  }
  return false;
}

bool IsOfClass(const PickleNode& node) {
  return node.kind == Kind::kGlobal || node.kind == Kind::kReduce || node.kind == Kind::kObject ||
         node.kind == Kind::kPersistent;
}

bool RunsNoCode(PickleRef value) {
  return !AnyNode(value,
                  [](const PickleNode& n) { return IsOfClass(n) || n.kind == Kind::kTensor; });
}

}  // namespace ckptfs
