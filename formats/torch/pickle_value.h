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
    kNone, kBool, kInt, kBigInt, kFloat, kString, kBytes, kByteArray,
    kTuple, kList, kDict, kSet, kFrozenSet,
    kGlobal,      // text = module, text2 = name
    kReduce,      // children[0](*children[1]) then state/items, see below
    kObject,      // NEWOBJ: cls children[0], args children[1][, kwargs children[2]]
    kPersistent,  // persistent id: children[0]
    kTensor,      // a recognised torch tensor (TensorNode in `tensors`)
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;    // kInt, kBool; kTensor: index into PickleTree::tensors
  double real = 0;        // kFloat
  std::string text;       // string (UTF-8), bytes, module, or kBigInt's little-endian bytes
  std::string text2;      // kGlobal: name
  // tuple, list, set: the items; dict: key, value, key, value ... in order;
  // kReduce/kObject: callee, arguments.
  std::vector<NodeId> children;
  // kReduce/kObject (and list/dict subclasses): the APPENDS, SETITEMS and BUILD
  // that followed, in this order when printed back (as CPython's pickler does).
  std::vector<NodeId> appended;
  std::vector<NodeId> items;  // key, value, ...
  std::optional<NodeId> state;
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
  std::string storage_class;  // kStorage: "FloatStorage", "UntypedStorage", "QInt8Storage" ...
  DType dtype = DType::kF32;
  std::string storage_key;    // "0", "1", ... -> record data/<key>
  uint64_t storage_elements = 0;
  uint64_t storage_offset = 0;  // elements
  Shape shape;
  std::vector<uint64_t> strides;  // elements
  bool requires_grad = false;
  bool is_parameter = false;  // wrapped by _rebuild_parameter
};

struct PickleTree {
  std::vector<PickleNode> nodes;
  std::vector<TensorNode> tensors;
  NodeId root = 0;
};

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
  std::optional<int64_t> Int() const;    // also an IntEnum: a class called with one int
  std::optional<bool> Bool() const;
  std::optional<double> Number() const;  // int or float
  std::optional<std::string_view> String() const;
  // Also the tensor inside a subclass or a parameter with state; never a bare storage.
  const TensorNode* Tensor() const;
  std::optional<Shape> AsShape() const;  // torch.Size or tuple/list of ints >= 0
  // "module.name" of a global, or of the class of an object.
  std::string ClassName() const;

  size_t size() const;                        // items of a dict or sequence
  PickleRef at(size_t i) const;               // sequence item
  PickleRef operator[](std::string_view key) const;  // dict by string key, or object state
  PickleRef AtInt(int64_t key) const;         // dict by int key
  std::vector<std::pair<PickleRef, PickleRef>> Items() const;  // dict in order
  PickleRef State() const;      // BUILD state of an object
  PickleRef Arguments() const;  // of a kReduce or kObject: the tuple

 private:
  const PickleTree* tree_ = nullptr;
  NodeId id_ = 0;
};

inline PickleRef RootOf(const PickleTree& tree) { return PickleRef(&tree, tree.root); }

}  // namespace ckptfs
