// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/machine.h"

#include "core/base/strings.h"
#include "formats/torch/pickle/tensor_rebuild.h"
#include "formats/torch/pickle/text.h"

namespace ckptfs {

using Kind = PickleNode::Kind;

// --- operands ---

Error PickleMachine::Rule(std::string_view rule) const {
  unsigned code = opcode_at_ < bytes_.size() ? static_cast<unsigned char>(bytes_[opcode_at_]) : 0;
  constexpr std::string_view kHex = "0123456789abcdef";
  return Error{ErrorCode::kInvalid,
               StrCat("pickle opcode 0x", kHex[code >> 4], kHex[code & 15], " at byte ", opcode_at_,
                      ": ", rule)};
}

Result<std::string_view> PickleMachine::Take(uint64_t length) {
  if (length > bytes_.size() - position_) {
    return Fail(Rule("the operand reaches beyond the end of the pickle"));
  }
  std::string_view taken = bytes_.substr(position_, length);
  position_ += length;
  return taken;
}

Result<uint64_t> PickleMachine::TakeInteger(int width) {
  CKPT_ASSIGN_OR_RETURN(std::string_view raw, Take(static_cast<uint64_t>(width)));
  uint64_t value = 0;
  for (size_t i = raw.size(); i-- > 0;) value = (value << 8) | static_cast<unsigned char>(raw[i]);
  return value;
}

Result<std::string_view> PickleMachine::TakeLine() {
  size_t end = bytes_.find('\n', position_);
  if (end == std::string_view::npos) return Fail(Rule("the operand has no end of line"));
  std::string_view line = bytes_.substr(position_, end - position_);
  position_ = end + 1;
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

Result<std::string_view> PickleMachine::TakeSized(int width) {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(width));
  return Take(length);
}

// --- stack ---

Status PickleMachine::PushId(NodeId id) {
  stack_.push_back(id);
  return {};
}

Status PickleMachine::Push(PickleNode node) {
  if (tree_.nodes.size() >= max_nodes_) return Fail(Rule(StrCat("more than ", max_nodes_, " values")));
  tree_.nodes.push_back(std::move(node));
  return PushId(static_cast<NodeId>(tree_.nodes.size() - 1));
}

Status PickleMachine::PushShared(NodeId& shared, Kind kind, int64_t integer) {
  if (shared != kNoNode) return PushId(shared);
  PickleNode node;
  node.kind = kind;
  node.integer = integer;
  CKPT_RETURN_IF_ERROR(Push(std::move(node)));
  shared = stack_.back();
  return {};
}

Result<NodeId> PickleMachine::Top() {
  size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() <= floor) return Fail(Rule("the stack is empty"));
  return stack_.back();
}

Result<NodeId> PickleMachine::Pop() {
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  stack_.pop_back();
  return id;
}

Result<std::vector<NodeId>> PickleMachine::PopMark() {
  if (marks_.empty()) return Fail(Rule("there is no mark"));
  auto begin = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
  std::vector<NodeId> items(begin, stack_.end());
  stack_.resize(marks_.back());
  marks_.pop_back();
  return items;
}

Status PickleMachine::PutMemo(uint64_t index) {
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  memo_[index] = id;
  return {};
}

Status PickleMachine::GetMemo(uint64_t index) {
  auto found = memo_.find(index);
  if (found == memo_.end()) return Fail(Rule(StrCat("nothing is memoised as ", index)));
  return PushId(found->second);
}

// --- calls ---

Status PickleMachine::PushGlobal(std::string_view module, std::string_view name) {
  if (module.empty() || name.empty()) return Fail(Rule("a global without a name"));
  if (!IsUtf8(module) || !IsUtf8(name)) return Fail(Rule("the name is not UTF-8"));
  if (protocol_ < 3) {  // Python 2 names, as the writer prints them again
    if (module == "__builtin__") module = "builtins";
    if (module == "copy_reg") module = "copyreg";
  }
  if (module.find('\n') != std::string_view::npos || name.find('\n') != std::string_view::npos) {
    return Fail(Rule("the name holds a line break"));
  }
  return Push(MakeGlobal(module, name));
}

// What calls copy must stay proportional to what the pickle says.
Status PickleMachine::Charge(const PickleNode& node) {
  charged_ += (node.children.size() + tree_.ExtraOf(node).items.size()) * sizeof(NodeId) +
              node.text.size();
  if (node.kind == Kind::kTensor) {
    const TensorNode& tensor = tree_.TensorOf(node);
    charged_ += sizeof(TensorNode) / 2 + tensor.storage_key.size() + tensor.shape.size();
  }
  if (charged_ > 16 * bytes_.size() + (uint64_t{1} << 20)) {
    return Fail(Rule("calls multiply memoised values"));
  }
  return {};
}

Status PickleMachine::PushReduce(NodeId callee, NodeId arguments) {
  if (tree_.nodes.size() >= max_nodes_) return Fail(Rule(StrCat("more than ", max_nodes_, " values")));
  auto known = RecogniseReduce(tree_, callee, arguments);
  if (known) {
    CKPT_RETURN_IF_ERROR(Charge(*known));
    return Push(*std::move(known));
  }
  PickleNode node;
  node.kind = Kind::kReduce;
  node.children = {callee, arguments};
  return Push(std::move(node));
}

Status PickleMachine::PushPersistent(NodeId id) {
  auto known = RecognisePersistent(tree_, id);
  if (known) {
    CKPT_RETURN_IF_ERROR(Charge(*known));
    return Push(*std::move(known));
  }
  PickleNode node;
  node.kind = Kind::kPersistent;
  node.children = {id};
  return Push(std::move(node));
}

Result<NodeId> PickleMachine::AddTuple(std::vector<NodeId> items) {
  PickleNode node;
  node.kind = Kind::kTuple;
  node.children = std::move(items);
  CKPT_RETURN_IF_ERROR(Push(std::move(node)));
  return Pop();
}

Status PickleMachine::AppendTo(const std::vector<NodeId>& items) {
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  Kind kind = tree_.nodes[id].kind;
  std::vector<NodeId>* list = nullptr;
  if (kind == Kind::kList) list = &tree_.nodes[id].children;
  if (kind == Kind::kReduce || kind == Kind::kObject) list = &tree_.MakeExtra(id).appended;
  if (list == nullptr) return Fail(Rule("appends to what is no list"));
  list->insert(list->end(), items.begin(), items.end());
  return {};
}

Status PickleMachine::SetItemsOf(const std::vector<NodeId>& items) {
  if (items.size() % 2 != 0) return Fail(Rule("a key without a value"));
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  Kind kind = tree_.nodes[id].kind;
  std::vector<NodeId>* dict = nullptr;
  if (kind == Kind::kDict) dict = &tree_.nodes[id].children;
  if (kind == Kind::kReduce || kind == Kind::kObject) dict = &tree_.MakeExtra(id).items;
  if (dict == nullptr) return Fail(Rule("sets items of what is no dict"));
  dict->insert(dict->end(), items.begin(), items.end());
  return {};
}

// --- opcodes ---

Status PickleMachine::DoMark() {
  marks_.push_back(stack_.size());
  return {};
}

Status PickleMachine::DoStop() {
  CKPT_ASSIGN_OR_RETURN(tree_.root, Pop());
  stopped_ = true;
  return {};
}

Status PickleMachine::DoPop() {
  if (!marks_.empty() && marks_.back() == stack_.size()) {
    marks_.pop_back();
    return {};
  }
  CKPT_RETURN_IF_ERROR(Pop());
  return {};
}

Status PickleMachine::DoPopMark() {
  CKPT_RETURN_IF_ERROR(PopMark());
  return {};
}

Status PickleMachine::DoDup() {
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  return PushId(id);
}

Status PickleMachine::DoProto() {
  CKPT_ASSIGN_OR_RETURN(uint64_t version, TakeInteger(1));
  if (version > 5) return Fail(Rule(StrCat("unknown pickle protocol ", version)));
  protocol_ = static_cast<int>(version);
  return {};
}

Status PickleMachine::DoFrame() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(8));
  if (length > bytes_.size() - position_) {
    return Fail(Rule("the frame reaches beyond the end of the pickle"));
  }
  return {};
}

Status PickleMachine::DoTuple() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  if (items.empty()) return DoEmptyTuple();
  CKPT_ASSIGN_OR_RETURN(NodeId tuple, AddTuple(std::move(items)));
  return PushId(tuple);
}

Status PickleMachine::DoTuple1() {
  CKPT_ASSIGN_OR_RETURN(NodeId a, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId tuple, AddTuple({a}));
  return PushId(tuple);
}

Status PickleMachine::DoTuple2() {
  CKPT_ASSIGN_OR_RETURN(NodeId b, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId a, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId tuple, AddTuple({a, b}));
  return PushId(tuple);
}

Status PickleMachine::DoTuple3() {
  CKPT_ASSIGN_OR_RETURN(NodeId c, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId b, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId a, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId tuple, AddTuple({a, b, c}));
  return PushId(tuple);
}

Status PickleMachine::DoEmptyTuple() { return PushShared(empty_tuple_, Kind::kTuple); }
Status PickleMachine::DoEmptyList() { return PushText(Kind::kList, ""); }
Status PickleMachine::DoEmptyDict() { return PushText(Kind::kDict, ""); }
Status PickleMachine::DoEmptySet() { return PushText(Kind::kSet, ""); }

Status PickleMachine::DoList() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  CKPT_RETURN_IF_ERROR(DoEmptyList());
  return AppendTo(items);
}

Status PickleMachine::DoDict() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  CKPT_RETURN_IF_ERROR(DoEmptyDict());
  return SetItemsOf(items);
}

Status PickleMachine::DoFrozenSet() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  PickleNode node;
  node.kind = Kind::kFrozenSet;
  node.children = std::move(items);
  return Push(std::move(node));
}

Status PickleMachine::DoAppend() {
  CKPT_ASSIGN_OR_RETURN(NodeId item, Pop());
  return AppendTo({item});
}

Status PickleMachine::DoAppends() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  return AppendTo(items);
}

Status PickleMachine::DoSetItem() {
  CKPT_ASSIGN_OR_RETURN(NodeId value, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId key, Pop());
  return SetItemsOf({key, value});
}

Status PickleMachine::DoSetItems() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  return SetItemsOf(items);
}

Status PickleMachine::DoAddItems() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  PickleNode& set = tree_.nodes[id];
  if (set.kind != Kind::kSet) return Fail(Rule("adds items to what is no set"));
  set.children.insert(set.children.end(), items.begin(), items.end());
  return {};
}

Status PickleMachine::DoGlobal() {
  CKPT_ASSIGN_OR_RETURN(std::string_view module, TakeLine());
  CKPT_ASSIGN_OR_RETURN(std::string_view name, TakeLine());
  return PushGlobal(module, name);
}

Status PickleMachine::DoStackGlobal() {
  CKPT_ASSIGN_OR_RETURN(NodeId name, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId module, Pop());
  if (tree_.nodes[name].kind != Kind::kString || tree_.nodes[module].kind != Kind::kString) {
    return Fail(Rule("the names of a global are no strings"));
  }
  // Copies: the nodes move when one is pushed.
  PickleNode copy = MakeGlobal(tree_.nodes[module].text, tree_.nodes[name].text);
  CKPT_RETURN_IF_ERROR(Charge(copy));
  std::string_view all = copy.text;
  return PushGlobal(all.substr(0, tree_.nodes[module].text.size()),
                    all.substr(tree_.nodes[module].text.size() + 1));
}

// INST and OBJ: a class called with what lies above the mark, or only made.
Status PickleMachine::DoInst() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  CKPT_RETURN_IF_ERROR(DoGlobal());
  CKPT_ASSIGN_OR_RETURN(NodeId cls, Pop());
  marks_.push_back(stack_.size());
  stack_.push_back(cls);
  stack_.insert(stack_.end(), items.begin(), items.end());
  return DoObj();
}

Status PickleMachine::DoObj() {
  CKPT_ASSIGN_OR_RETURN(auto items, PopMark());
  if (items.empty()) return Fail(Rule("an object without a class"));
  NodeId cls = items.front();
  items.erase(items.begin());
  bool called = !items.empty();
  CKPT_ASSIGN_OR_RETURN(NodeId arguments, AddTuple(std::move(items)));
  if (called) return PushReduce(cls, arguments);
  PickleNode node;
  node.kind = Kind::kObject;
  node.children = {cls, arguments};
  return Push(std::move(node));
}

Status PickleMachine::DoReduce() {
  CKPT_ASSIGN_OR_RETURN(NodeId arguments, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId callee, Pop());
  if (tree_.nodes[arguments].kind != Kind::kTuple) {
    return Fail(Rule("the arguments of a call are no tuple"));
  }
  return PushReduce(callee, arguments);
}

Status PickleMachine::DoNewObj() {
  CKPT_ASSIGN_OR_RETURN(NodeId arguments, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId cls, Pop());
  if (tree_.nodes[arguments].kind != Kind::kTuple) {
    return Fail(Rule("the arguments of a class are no tuple"));
  }
  PickleNode node;
  node.kind = Kind::kObject;
  node.children = {cls, arguments};
  return Push(std::move(node));
}

Status PickleMachine::DoNewObjEx() {
  CKPT_ASSIGN_OR_RETURN(NodeId keywords, Pop());
  CKPT_RETURN_IF_ERROR(DoNewObj());
  if (tree_.nodes[keywords].kind != Kind::kDict) {
    return Fail(Rule("the keyword arguments of a class are no dict"));
  }
  tree_.nodes[stack_.back()].children.push_back(keywords);
  return {};
}

Status PickleMachine::DoBuild() {
  CKPT_ASSIGN_OR_RETURN(NodeId state, Pop());
  CKPT_ASSIGN_OR_RETURN(NodeId id, Top());
  Kind kind = tree_.nodes[id].kind;
  if (kind != Kind::kReduce && kind != Kind::kObject && kind != Kind::kTensor &&
      kind != Kind::kPersistent) {
    return Fail(Rule("sets the state of what is no object"));
  }
  PickleExtra& extra = tree_.MakeExtra(id);
  if (extra.state) return Fail(Rule("sets the state of an object twice"));
  extra.state = state;
  return {};
}

Status PickleMachine::DoPersId() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  CKPT_RETURN_IF_ERROR(PushString(line));
  return DoBinPersId();
}

Status PickleMachine::DoBinPersId() {
  CKPT_ASSIGN_OR_RETURN(NodeId id, Pop());
  return PushPersistent(id);
}

Status PickleMachine::DoRefuse() {
  return Fail(Rule("extension codes and out-of-band buffers are not supported"));
}

Status PickleMachine::DoPut() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  auto digits = ParseDecimal(line);
  if (!digits || line.size() > 18 || line.starts_with('-')) return Fail(Rule("a bad memo index"));
  return PutMemo(std::stoull(std::string(line)));
}

Status PickleMachine::DoBinPut() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(1));
  return PutMemo(index);
}

Status PickleMachine::DoLongBinPut() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(4));
  return PutMemo(index);
}

Status PickleMachine::DoMemoize() { return PutMemo(memo_.size()); }

Status PickleMachine::DoGet() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  auto digits = ParseDecimal(line);
  if (!digits || line.size() > 18 || line.starts_with('-')) return Fail(Rule("a bad memo index"));
  return GetMemo(std::stoull(std::string(line)));
}

Status PickleMachine::DoBinGet() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(1));
  return GetMemo(index);
}

Status PickleMachine::DoLongBinGet() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(4));
  return GetMemo(index);
}

}  // namespace ckptfs
