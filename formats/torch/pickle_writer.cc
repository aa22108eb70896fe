// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle_writer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <unordered_map>

#include "core/base/strings.h"
#include "formats/torch/pickle/opcodes.h"
#include "formats/torch/pickle/storage_types.h"
#include "formats/torch/pickle/text.h"
#include "formats/torch/print_value.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

constexpr size_t kBatch = 1000;  // items per APPENDS or SETITEMS, as CPython writes

// Prints with an explicit stack of tasks, so that depth costs memory and no
// machine stack.
class PicklePrinter {
 public:
  enum class Strings : uint8_t { kByIdentity, kByText };
  PicklePrinter(const PickleTree& tree, NodeId root, Strings strings)
      : tree_(tree), root_(root), merged_(strings == Strings::kByText) {}
  Result<std::string> Print();

 private:
  struct Task {
    enum class Type : uint8_t { kSave, kOp, kCreated } type;
    Op op = Op::kStop;
    NodeId id = 0;
  };

  void CountReferences();
  Status Save(NodeId id);
  void SaveCall(NodeId id, const PickleNode& node);
  void SaveTuple(NodeId id, const PickleNode& node);
  Status SaveTensor(NodeId id, const PickleNode& node);
  Status Created(NodeId id);

  // Tasks run in the order of these calls within one Save.
  void Later(Op op) { pending_.push_back({Task::Type::kOp, op, 0}); }
  void LaterSave(NodeId id) { pending_.push_back({Task::Type::kSave, Op::kStop, id}); }
  void LaterCreated(NodeId id) { pending_.push_back({Task::Type::kCreated, Op::kStop, id}); }
  void LaterBatches(const std::vector<NodeId>& items, Op close);

  void Put(Op op) { out_ += static_cast<char>(op); }
  void PutLittle(uint64_t value, int width);
  void PutInt(int64_t value);
  Status PutString(std::string_view text);
  Status PutBytes(std::string_view bytes);
  Status PutGlobal(std::string_view module, std::string_view name);
  Status PutScalar(const PickleNode& node);
  void PutBool(bool value) { Put(value ? Op::kNewTrue : Op::kNewFalse); }
  void PutInts(const std::vector<uint64_t>& values);  // a tuple
  Status PutStorage(const TensorNode& tensor);
  Status PutHooks();
  Status PutTensorArguments(const TensorNode& tensor);
  Status PutTensor(const TensorNode& tensor);
  void PutGet(uint32_t index);
  uint32_t PutMemo();
  // A constant that many tensors name: spelled once, then fetched.
  Status PutShared(std::string_view module, std::string_view name);
  Status PutSharedString(std::string_view text);
  Status PutMerged(std::string_view text);

  const PickleTree& tree_;
  const NodeId root_;
  const bool merged_;  // equal strings are one
  std::string out_;
  std::vector<Task> stack_;
  std::vector<Task> pending_;
  std::vector<uint8_t> shared_;  // by node: referenced more than once
  std::vector<uint32_t> memo_;   // by node: index + 1, 0 = none
  std::map<std::string, uint32_t, std::less<>> constants_;
  std::unordered_map<std::string_view, uint32_t> texts_;  // those of the tree, by memo index
  uint32_t memo_size_ = 0;
  uint64_t edges_ = 0;
};

tl::unexpected<Error> CannotPrint(std::string_view message) {
  return Fail(ErrorCode::kInvalid, StrCat("cannot print the pickle: ", message));
}

bool IsOne(Kind kind, std::initializer_list<Kind> kinds) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

// Kinds whose identity nobody can see: never memoised.
bool IsAtom(Kind kind) {
  return IsOne(kind, {Kind::kNone, Kind::kBool, Kind::kInt, Kind::kFloat, Kind::kGlobal});
}

Op TupleOp(size_t size) {
  if (size == 1) return Op::kTuple1;
  if (size == 2) return Op::kTuple2;
  return size == 3 ? Op::kTuple3 : Op::kTuple;
}

// Depth first, so that cycles show; in a tree with cycles every container is
// memoised, since any of them may be met again while it is being printed.
void PicklePrinter::CountReferences() {
  shared_.assign(tree_.nodes.size(), 0);
  memo_.assign(tree_.nodes.size(), 0);
  enum State : uint8_t { kNew, kOpen, kDone };
  std::vector<uint8_t> states(tree_.nodes.size(), kNew);
  std::vector<uint8_t> seen(tree_.nodes.size(), 0);
  std::vector<NodeId> work{root_};
  bool cyclic = false;
  while (!work.empty()) {
    NodeId id = work.back();
    if (states[id] != kNew) {
      work.pop_back();
      states[id] = kDone;
      continue;
    }
    states[id] = kOpen;
    const PickleNode& node = tree_.nodes[id];
    ForEachEdge(node, tree_.ExtraOf(node), [&](NodeId child) {
      ++edges_;
      if (seen[child] != 0) shared_[child] = 1;
      seen[child] = 1;
      if (states[child] == kNew) work.push_back(child);
      if (states[child] == kOpen) cyclic = true;
    });
  }
  if (cyclic) shared_.assign(tree_.nodes.size(), 1);
}

// --- bytes ---

void PicklePrinter::PutLittle(uint64_t value, int width) {
  for (int i = 0; i < width; ++i) out_ += static_cast<char>((value >> (8 * i)) & 0xff);
}

void PicklePrinter::PutInt(int64_t value) {
  if (value >= 0 && value < 256) {
    Put(Op::kBinInt1);
    PutLittle(static_cast<uint64_t>(value), 1);
  } else if (value >= 0 && value < 65536) {
    Put(Op::kBinInt2);
    PutLittle(static_cast<uint64_t>(value), 2);
  } else if (value >= std::numeric_limits<int32_t>::min() &&
             value <= std::numeric_limits<int32_t>::max()) {
    Put(Op::kBinInt);
    PutLittle(static_cast<uint64_t>(value), 4);
  } else {
    int width = 5;
    while (width < 8 && (value >> (8 * width - 1)) != (value < 0 ? -1 : 0)) ++width;
    Put(Op::kLong1);
    PutLittle(static_cast<uint64_t>(width), 1);
    PutLittle(static_cast<uint64_t>(value), width);
  }
}

Status PicklePrinter::PutString(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max())
    return CannotPrint("a string exceeds 4 GiB");
  Put(Op::kBinUnicode);
  PutLittle(text.size(), 4);
  out_ += text;
  return {};
}

void PicklePrinter::PutGet(uint32_t index) {
  Put(index < 256 ? Op::kBinGet : Op::kLongBinGet);
  PutLittle(index, index < 256 ? 1 : 4);
}

uint32_t PicklePrinter::PutMemo() {
  uint32_t index = memo_size_++;
  Put(index < 256 ? Op::kBinPut : Op::kLongBinPut);
  PutLittle(index, index < 256 ? 1 : 4);
  return index;
}

Status PicklePrinter::PutGlobal(std::string_view module, std::string_view name) {
  size_t dot = name.rfind('.');
  if (dot != std::string_view::npos && dot != 0) {  // a nested class: getattr(outer, name)
    return CannotPrint(StrCat("nested name '", module, ".", name, "'"));
  }
  if (module.find('\n') != std::string_view::npos || name.find('\n') != std::string_view::npos) {
    return CannotPrint("a global's name holds a line break");
  }
  if (module == "builtins") module = "__builtin__";  // protocol 2 has Python 2 names
  if (module == "copyreg") module = "copy_reg";
  Put(Op::kGlobal);
  out_ += module;
  out_ += '\n';
  out_ += name;
  out_ += '\n';
  return {};
}

Status PicklePrinter::PutShared(std::string_view module, std::string_view name) {
  std::string key = StrCat(module, "\n", name);
  if (auto found = constants_.find(key); found != constants_.end()) {
    PutGet(found->second);
    return {};
  }
  // getattr(getattr(module.A, 'B'), 'C') for A.B.C.
  size_t dot = name.find('.');
  size_t parts = 1 + static_cast<size_t>(std::count(name.begin(), name.end(), '.'));
  for (size_t i = 1; i < parts; ++i) CKPT_RETURN_IF_ERROR(PutShared("builtins", "getattr"));
  CKPT_RETURN_IF_ERROR(PutGlobal(module, name.substr(0, dot)));
  while (dot != std::string_view::npos) {
    size_t next = name.find('.', dot + 1);
    CKPT_RETURN_IF_ERROR(PutString(name.substr(dot + 1, next - dot - 1)));
    Put(Op::kTuple2);
    Put(Op::kReduce);
    dot = next;
  }
  constants_.emplace(std::move(key), PutMemo());
  return {};
}

Status PicklePrinter::PutSharedString(std::string_view text) {
  if (auto found = constants_.find(text); found != constants_.end()) {
    PutGet(found->second);
    return {};
  }
  CKPT_RETURN_IF_ERROR(PutString(text));
  constants_.emplace(text, PutMemo());
  return {};
}

Status PicklePrinter::PutMerged(std::string_view text) {
  if (const auto found = texts_.find(text); found != texts_.end()) {
    PutGet(found->second);
    return {};
  }
  CKPT_RETURN_IF_ERROR(PutString(text));
  texts_.emplace(text, PutMemo());
  return {};
}

// _codecs.encode(text, 'latin1'), which weights_only readers accept.
Status PicklePrinter::PutBytes(std::string_view bytes) {
  CKPT_RETURN_IF_ERROR(PutShared("_codecs", "encode"));
  CKPT_RETURN_IF_ERROR(PutString(Latin1ToUtf8(bytes)));
  CKPT_RETURN_IF_ERROR(PutSharedString("latin1"));
  Put(Op::kTuple2);
  Put(Op::kReduce);
  return {};
}

Status PicklePrinter::PutScalar(const PickleNode& node) {
  switch (node.kind) {
    case Kind::kNone: Put(Op::kNone); return {};
    case Kind::kBool: PutBool(node.integer != 0); return {};
    case Kind::kInt: PutInt(node.integer); return {};
    case Kind::kString: return PutString(node.text);
    case Kind::kBytes: return PutBytes(node.text);
    case Kind::kGlobal: return PutShared(GlobalModule(node), GlobalName(node));
    case Kind::kByteArray:
      CKPT_RETURN_IF_ERROR(PutShared("builtins", "bytearray"));
      CKPT_RETURN_IF_ERROR(PutBytes(node.text));
      Put(Op::kTuple1);
      Put(Op::kReduce);
      return {};
    case Kind::kBigInt:
      // LONG4 is outside what weights_only readers know.
      if (node.text.size() > 255) return CannotPrint("an integer of more than 255 bytes");
      Put(Op::kLong1);
      PutLittle(node.text.size(), 1);
      out_ += node.text;
      return {};
    case Kind::kFloat: {
      Put(Op::kBinFloat);
      uint64_t bits = std::bit_cast<uint64_t>(node.real);
      for (int i = 7; i >= 0; --i) out_ += static_cast<char>((bits >> (8 * i)) & 0xff);
      return {};
    }
    default: return CannotPrint("unknown kind of node");
  }
}

// --- tensors ---

void PicklePrinter::PutInts(const std::vector<uint64_t>& values) {
  if (values.empty()) return Put(Op::kEmptyTuple);
  if (values.size() > 3) Put(Op::kMark);
  for (uint64_t value : values) PutInt(static_cast<int64_t>(value));
  Put(TupleOp(values.size()));
}

// ('storage', class, key, 'cpu', elements) as a persistent id.
Status PicklePrinter::PutStorage(const TensorNode& tensor) {
  std::string_view type = StorageClassOf(tensor.dtype);
  uint64_t elements = tensor.storage_elements;
  if (tensor.form == TensorNode::Form::kStorage) {
    if (tensor.storage_offset != 0 || tensor.shape != Shape{tensor.storage_elements}) {
      return CannotPrint("a storage that is a view of another");
    }
    type = tensor.storage_class;
  } else if (type.empty()) {
    type = kUntypedStorage;
    elements *= ByteWidth(tensor.dtype);
  }
  Put(Op::kMark);
  CKPT_RETURN_IF_ERROR(PutSharedString("storage"));
  CKPT_RETURN_IF_ERROR(PutShared(type == kUntypedStorage ? "torch.storage" : "torch", type));
  CKPT_RETURN_IF_ERROR(PutString(tensor.storage_key));
  CKPT_RETURN_IF_ERROR(PutSharedString("cpu"));
  PutInt(static_cast<int64_t>(elements));
  Put(Op::kTuple);
  Put(Op::kBinPersId);
  return {};
}

Status PicklePrinter::PutHooks() {
  CKPT_RETURN_IF_ERROR(PutShared("collections", "OrderedDict"));
  Put(Op::kEmptyTuple);
  Put(Op::kReduce);
  return {};
}

// (storage, offset, size, stride, requires_grad, hooks[, dtype])
Status PicklePrinter::PutTensorArguments(const TensorNode& tensor) {
  bool untyped = StorageClassOf(tensor.dtype).empty();
  if (untyped && TorchName(tensor.dtype).empty())
    return CannotPrint("a dtype that torch does not have");
  Put(Op::kMark);
  CKPT_RETURN_IF_ERROR(PutStorage(tensor));
  PutInt(static_cast<int64_t>(tensor.storage_offset));
  PutInts(tensor.shape);
  PutInts(tensor.strides);
  PutBool(tensor.requires_grad && !tensor.is_parameter);
  CKPT_RETURN_IF_ERROR(PutHooks());
  if (untyped) CKPT_RETURN_IF_ERROR(PutShared("torch", TorchName(tensor.dtype)));
  Put(Op::kTuple);
  return {};
}

Status PicklePrinter::PutTensor(const TensorNode& tensor) {
  if (tensor.form == TensorNode::Form::kArguments) return PutTensorArguments(tensor);
  if (tensor.form == TensorNode::Form::kStorage) return PutStorage(tensor);
  if (tensor.is_parameter) CKPT_RETURN_IF_ERROR(PutShared("torch._utils", "_rebuild_parameter"));
  bool untyped = StorageClassOf(tensor.dtype).empty();
  CKPT_RETURN_IF_ERROR(
      PutShared("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2"));
  CKPT_RETURN_IF_ERROR(PutTensorArguments(tensor));
  Put(Op::kReduce);
  if (!tensor.is_parameter) return {};
  PutBool(tensor.requires_grad);
  CKPT_RETURN_IF_ERROR(PutHooks());
  Put(Op::kTuple3);
  Put(Op::kReduce);
  return {};
}

// --- nodes ---

void PicklePrinter::LaterBatches(const std::vector<NodeId>& items, Op close) {
  size_t step = close == Op::kSetItems ? 2 * kBatch : kBatch;
  for (size_t begin = 0; begin < items.size(); begin += step) {
    Later(Op::kMark);
    size_t end = std::min(items.size(), begin + step);
    for (size_t i = begin; i < end; ++i) LaterSave(items[i]);
    Later(close);
  }
}

void PicklePrinter::SaveTuple(NodeId id, const PickleNode& node) {
  if (node.children.empty()) return Put(Op::kEmptyTuple);
  if (node.children.size() > 3) Put(Op::kMark);
  for (NodeId child : node.children) LaterSave(child);
  Later(TupleOp(node.children.size()));
  LaterCreated(id);
}

void PicklePrinter::SaveCall(NodeId id, const PickleNode& node) {
  for (NodeId child : node.children) LaterSave(child);
  if (node.kind == Kind::kPersistent) {
    Later(Op::kBinPersId);
  } else if (node.children.size() == 3) {  // copyreg.__newobj_ex__(cls, arguments, keywords)
    Later(Op::kTuple3);
    Later(Op::kReduce);
  } else {
    Later(node.kind == Kind::kReduce ? Op::kReduce : Op::kNewObj);
  }
  LaterCreated(id);
  LaterBatches(tree_.ExtraOf(node).appended, Op::kAppends);
  LaterBatches(tree_.ExtraOf(node).items, Op::kSetItems);
}

Status PicklePrinter::SaveTensor(NodeId id, const PickleNode& node) {
  CKPT_RETURN_IF_ERROR(PutTensor(tree_.TensorOf(node)));
  LaterCreated(id);
  return {};
}

Status PicklePrinter::Save(NodeId id) {
  if (memo_[id] != 0) {
    PutGet(memo_[id] - 1);
    return {};
  }
  const PickleNode& node = tree_.nodes[id];
  switch (node.kind) {
    case Kind::kTuple: SaveTuple(id, node); break;
    case Kind::kList:
    case Kind::kDict: {
      bool list = node.kind == Kind::kList;
      Put(list ? Op::kEmptyList : Op::kEmptyDict);
      CKPT_RETURN_IF_ERROR(Created(id));
      LaterBatches(node.children, list ? Op::kAppends : Op::kSetItems);
      break;
    }
    case Kind::kSet:
    case Kind::kFrozenSet:
      CKPT_RETURN_IF_ERROR(PutShared("builtins", node.kind == Kind::kSet ? "set" : "frozenset"));
      Put(Op::kEmptyList);
      LaterBatches(node.children, Op::kAppends);
      Later(Op::kTuple1);
      Later(Op::kReduce);
      LaterCreated(id);
      break;
    case Kind::kReduce:
    case Kind::kObject:
    case Kind::kPersistent:
      if (node.children.size() == 3) CKPT_RETURN_IF_ERROR(PutShared("copyreg", "__newobj_ex__"));
      SaveCall(id, node);
      break;
    case Kind::kTensor: CKPT_RETURN_IF_ERROR(SaveTensor(id, node)); break;
    default:
      if (merged_ && node.kind == Kind::kString) return PutMerged(node.text);
      CKPT_RETURN_IF_ERROR(PutScalar(node));
      return IsAtom(node.kind) ? Status() : Created(id);
  }
  if (const auto& state = tree_.ExtraOf(node).state) {
    LaterSave(*state);
    Later(Op::kBuild);
  }
  return {};
}

// The value is on top of the reader's stack now.  If a cycle through it made
// it already, that one counts (as in CPython's pickler).
Status PicklePrinter::Created(NodeId id) {
  if (memo_[id] != 0) {
    Put(Op::kPop);
    PutGet(memo_[id] - 1);
  } else if (shared_[id] != 0) {
    if (memo_size_ == std::numeric_limits<uint32_t>::max())
      return CannotPrint("too many shared values");
    memo_[id] = PutMemo() + 1;
  }
  return {};
}

Result<std::string> PicklePrinter::Print() {
  CountReferences();
  Put(Op::kProto);
  out_ += '\x02';
  stack_.push_back({Task::Type::kSave, Op::kStop, root_});
  uint64_t budget = 16 * (edges_ + 64);  // cycles through immutable values print parts twice
  while (!stack_.empty()) {
    Task task = stack_.back();
    stack_.pop_back();
    if (budget-- == 0) return CannotPrint("too many cycles through immutable values");
    switch (task.type) {
      case Task::Type::kOp: Put(task.op); break;
      case Task::Type::kCreated: CKPT_RETURN_IF_ERROR(Created(task.id)); break;
      case Task::Type::kSave: CKPT_RETURN_IF_ERROR(Save(task.id)); break;
    }
    stack_.insert(stack_.end(), pending_.rbegin(), pending_.rend());
    pending_.clear();
  }
  Put(Op::kStop);
  return std::move(out_);
}

}  // namespace

Result<std::string> PrintPickle(const PickleTree& tree) {
  return PicklePrinter(tree, tree.root, PicklePrinter::Strings::kByIdentity).Print();
}

Result<std::string> PrintValue(PickleRef value) {
  return PicklePrinter(value.tree(), value.id(), PicklePrinter::Strings::kByText).Print();
}

}  // namespace ckptfs
