// SPDX-License-Identifier: Apache-2.0
//
// PickleTree is a pickle as data: a tree (with sharing, possibly cycles) of
// nodes in an arena.  Nothing is imported or called.  Known and unknown
// globals alike are kGlobal nodes; what was called on them stays as
// arguments and state, so every tree can be printed back (pickle_writer.h).
//
// Thread safety: immutable once built.
// Lifetime: PickleRef borrows the tree.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

using NodeId = uint32_t;

struct PickleNode {
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kBigInt,
    kFloat,
    kString,
    kBytes,
    kByteArray,
    kTuple,
    kList,
    kDict,
    kSet,
    kFrozenSet,
    kGlobal,      // text = module, text2 = name
    kReduce,      // children[0](*children[1]) then state/items, see below
    kObject,      // NEWOBJ: cls children[0], args children[1][, kwargs children[2]]
    kPersistent,  // persistent id: children[0]
    kTensor,      // a recognised torch tensor (TensorNode in `tensors`)
  };
  Kind kind = Kind::kNone;
  uint32_t extra = kNoExtra;  // index into PickleTree::extras
  union {
    int64_t integer = 0;  // kInt, kBool; kTensor: index into PickleTree::tensors
    double real;          // kFloat
  };
  // A string (UTF-8), bytes, kBigInt's little-endian two's complement; a global:
  // module, line break, name (neither can hold a line break).
  std::string text = {};
  // tuple, list, set: the items; dict: key, value, key, value ... in order;
  // kReduce/kObject: callee, arguments[, keyword arguments].
  std::vector<NodeId> children = {};

  static constexpr uint32_t kNoExtra = ~uint32_t{0};
};

// The opcodes that followed the making of a kReduce, kObject, kTensor or kPersistent:
// APPENDS, SETITEMS and BUILD, in this order when printed back (as CPython's
// pickler does).
struct PickleExtra {
  std::vector<NodeId> appended = {};
  std::vector<NodeId> items = {};  // key, value, ...
  std::optional<NodeId> state = {};
};

// torch._utils._rebuild_tensor_v2 / _v3 / parameter over a storage persistent id.
struct TensorNode {
  enum class Form : uint8_t {
    kTensor,
    // The argument tuple of a rebuild function that something else is to call
    // (_rebuild_from_type_v2: a Tensor or Parameter subclass or one with attributes).
    kArguments,
    // A storage by itself, also inside rebuild calls that stay opaque (quantised
    // tensors); shape is [elements].
    kStorage,
  };
  Form form = Form::kTensor;
  std::string storage_class = {};  // kStorage: "FloatStorage", "UntypedStorage", "QInt8Storage" ...
  DType dtype = DType::kF32;
  std::string storage_key = {};  // "0", "1", ... -> record data/<key>
  uint64_t storage_elements = 0;
  uint64_t storage_offset = 0;  // elements
  Shape shape = {};
  std::vector<uint64_t> strides = {};  // elements
  bool requires_grad = false;
  bool is_parameter = false;  // wrapped by _rebuild_parameter
};

struct PickleTree {
  std::vector<PickleNode> nodes = {};
  std::vector<TensorNode> tensors = {};
  std::vector<PickleExtra> extras = {};
  NodeId root = 0;

  // An empty one if the node has none.
  const PickleExtra& ExtraOf(const PickleNode& node) const;
  PickleExtra& MakeExtra(NodeId id);
  // REQUIRES: the node is a kTensor.
  const TensorNode& TensorOf(const PickleNode& node) const {
    return tensors[static_cast<size_t>(node.integer)];
  }
};

// The two halves of a kGlobal.
std::string_view GlobalModule(const PickleNode& global);
std::string_view GlobalName(const PickleNode& global);
bool IsGlobal(const PickleNode& node, std::string_view module, std::string_view name);
PickleNode MakeGlobal(std::string_view module, std::string_view name);

// Calls `visit(NodeId&)` or `visit(NodeId)` for every edge of a node, in order.
template <class Node, class Extra, class Visit>
void ForEachEdge(Node& node, Extra& extra, Visit visit) {
  for (auto& id : node.children) visit(id);
  for (auto& id : extra.appended) visit(id);
  for (auto& id : extra.items) visit(id);
  if (extra.state) visit(*extra.state);
}

// A position in a tree with checked access.  Every accessor of the wrong kind
// returns an empty optional / invalid ref, so that lookups chain:
//   RootOf(tree)["optimizer_state_dict"]["zero_stage"].Int()
class PickleRef {
 public:
  PickleRef() = default;
  PickleRef(const PickleTree* tree, NodeId id) : tree_(tree), id_(id) {}
  explicit operator bool() const { return tree_ != nullptr; }
  NodeId id() const { return id_; }
  const PickleNode& node() const { return tree_->nodes[id_]; }
  const PickleTree& tree() const { return *tree_; }

  bool IsNone() const;
  bool IsDict() const;      // dict, OrderedDict, defaultdict ... (REDUCE/NEWOBJ with items)
  bool IsSequence() const;  // list, tuple, torch.Size
  std::optional<int64_t> Int() const;  // these three: of Python or numpy
  std::optional<bool> Bool() const;
  std::optional<double> Number() const;  // int or float
  std::optional<std::string_view> String() const;
  // Also the tensor inside a subclass or a parameter with state; never a bare
  // storage, nor one whose elements depend on a BUILD (torch's legacy set_).
  const TensorNode* Tensor() const;
  // A tensor to torch, though not a plain one: lazily negated or conjugated,
  // quantised, sparse, of a BUILD; or a bare storage.
  bool IsOtherTensor() const;
  std::optional<Shape> AsShape() const;  // torch.Size or tuple/list of ints >= 0
  // "module.name" of a global, or of the class of an object.
  std::string ClassName() const;

  size_t size() const;                               // items of a dict or sequence
  PickleRef at(size_t i) const;                      // sequence item
  PickleRef operator[](std::string_view key) const;  // dict by string key, or object state
  PickleRef AtInt(int64_t key) const;                // dict by int key
  std::vector<std::pair<PickleRef, PickleRef>> Items() const;  // dict in order
  PickleRef State() const;                                     // BUILD state of an object
  PickleRef Arguments() const;                                 // of a kReduce or kObject: the tuple

 private:
  const PickleTree* tree_ = nullptr;
  NodeId id_ = 0;
};

inline PickleRef RootOf(const PickleTree& tree) { return PickleRef(&tree, tree.root); }

// True if the condition holds for any node of the value, itself included.
bool AnyNode(PickleRef value, const std::function<bool(const PickleNode&)>& condition);
// True if the node names a class or a function, or is made by one.
bool IsOfClass(const PickleNode& node);
// True if loading the value runs no code of the checkpoint's: numbers, texts, bytes and containers
// of them.
bool RunsNoCode(PickleRef value);

}  // namespace ckptfs
