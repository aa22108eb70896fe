// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/machine.h"

#include <array>
#include <string>

#include "core/base/strings.h"
#include "formats/torch/pickle/packed_values.h"
#include "formats/torch/pickle/text.h"
#include "formats/torch/pickle/tree_values.h"

namespace ckptfs {

// --- operands ---

template <class Values>
Result<uint64_t> PickleMachine<Values>::TakeInteger(int width) {
  CKPT_ASSIGN_OR_RETURN(std::string_view raw, input_.Take(static_cast<uint64_t>(width)));
  uint64_t value = 0;
  for (size_t i = raw.size(); i-- > 0;) value = (value << 8) | static_cast<unsigned char>(raw[i]);
  return value;
}

template <class Values>
Result<std::string_view> PickleMachine<Values>::TakeSized(int width) {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(width));
  return input_.Take(length);
}

template <class Values>
Result<uint64_t> PickleMachine<Values>::TakeIndex() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  const auto digits = ParseDecimal(line);
  if (!digits || line.size() > 18 || line.starts_with('-')) return Refuse("a bad memo index");
  return std::stoull(std::string(line));
}

// --- stack ---

template <class Values>
Status PickleMachine<Values>::Push(Result<Value> value) {
  if (!value) [[unlikely]]
    return Fail(std::move(value).error());
  if (stack_.size() >= Values::kMaxMemo) [[unlikely]]
    return Refuse("the stack is too deep");
  stack_.push_back(*value);
  return {};
}

template <class Values>
auto PickleMachine<Values>::Top() -> Result<Value> {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() <= floor) return Refuse("the stack is empty");
  return stack_.back();
}

template <class Values>
auto PickleMachine<Values>::Pop() -> Result<Value> {
  CKPT_ASSIGN_OR_RETURN(Value value, Top());
  stack_.pop_back();
  return value;
}

template <class Values>
auto PickleMachine<Values>::Marked() -> Result<std::span<const Value>> {
  if (marks_.empty()) return Refuse("there is no mark");
  return std::span<const Value>(stack_).subspan(marks_.back());
}

template <class Values>
void PickleMachine<Values>::DropMark() {
  stack_.resize(marks_.back());
  marks_.pop_back();
}

template <class Values>
Status PickleMachine<Values>::PutMemo(uint64_t index) {
  CKPT_ASSIGN_OR_RETURN(Value value, Top());
  if (MemoSize() >= Values::kMaxMemo)
    return Refuse("more than ", Values::kMaxMemo, " memo entries");
  if (index < memo_.size()) {
    memo_[index] = value;
  } else if (index == memo_.size() && scattered_.empty()) {
    memo_.push_back(value);
  } else {
    scattered_[index] = value;
  }
  return {};
}

template <class Values>
Status PickleMachine<Values>::GetMemo(uint64_t index) {
  if (index < memo_.size()) return Push(memo_[index]);
  const auto found = scattered_.find(index);
  if (found == scattered_.end()) return Refuse("nothing is memoised as ", index);
  return Push(found->second);
}

template <class Values>
Status PickleMachine<Values>::PushTuple(size_t count) {
  const size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() < floor + count) return Refuse("the stack is empty");
  CKPT_ASSIGN_OR_RETURN(Value tuple, values_.Tuple(std::span<const Value>(stack_).last(count)));
  stack_.resize(stack_.size() - count);
  stack_.push_back(tuple);
  return {};
}

template <class Values>
auto PickleMachine<Values>::MakeGlobal(std::string_view module, std::string_view name)
    -> Result<Value> {
  if (module.empty() || name.empty()) return Refuse("a global without a name");
  if (!IsUtf8(module) || !IsUtf8(name)) return Refuse("the name is not UTF-8");
  if (protocol_ < 3) {  // Python 2 names, as the writer prints them again
    if (module == "__builtin__") module = "builtins";
    if (module == "copy_reg") module = "copyreg";
  }
  return values_.Global(module, name);
}

// --- opcodes ---

template <class Values>
Status PickleMachine<Values>::DoMark() {
  if (marks_.size() >= Values::kMaxMemo) return Refuse("marks are nested too deep");
  marks_.push_back(stack_.size());
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoStop() {
  CKPT_RETURN_IF_ERROR(Top());
  stopped_ = true;
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoPop() {
  if (!marks_.empty() && marks_.back() == stack_.size()) {
    marks_.pop_back();
    return {};
  }
  CKPT_RETURN_IF_ERROR(Pop());
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoPopMark() {
  CKPT_RETURN_IF_ERROR(Marked());
  DropMark();
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoDup() {
  return Push(Top());
}

template <class Values>
Status PickleMachine<Values>::DoProto() {
  CKPT_ASSIGN_OR_RETURN(uint64_t version, TakeInteger(1));
  if (version > 5) return Refuse("unknown pickle protocol ", version);
  protocol_ = static_cast<int>(version);
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoFrame() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(8));
  if (length > input_.size() - input_.position()) {
    return Refuse("the frame reaches beyond the end of the pickle");
  }
  return {};
}

template <class Values>
Status PickleMachine<Values>::DoTuple() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  CKPT_ASSIGN_OR_RETURN(Value tuple, values_.Tuple(items));
  DropMark();
  return Push(tuple);
}

template <class Values>
Status PickleMachine<Values>::DoTuple1() {
  return PushTuple(1);
}
template <class Values>
Status PickleMachine<Values>::DoTuple2() {
  return PushTuple(2);
}
template <class Values>
Status PickleMachine<Values>::DoTuple3() {
  return PushTuple(3);
}

template <class Values>
Status PickleMachine<Values>::DoEmptyTuple() {
  return Push(values_.Tuple({}));
}
template <class Values>
Status PickleMachine<Values>::DoEmptyList() {
  return Push(values_.List());
}
template <class Values>
Status PickleMachine<Values>::DoEmptyDict() {
  return Push(values_.Dict());
}
template <class Values>
Status PickleMachine<Values>::DoEmptySet() {
  return Push(values_.Set());
}

template <class Values>
Status PickleMachine<Values>::DoList() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  CKPT_ASSIGN_OR_RETURN(Value list, values_.List());
  CKPT_RETURN_IF_ERROR(values_.Append(list, items));
  DropMark();
  return Push(list);
}

template <class Values>
Status PickleMachine<Values>::DoDict() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  if (items.size() % 2 != 0) return Refuse("a key without a value");
  CKPT_ASSIGN_OR_RETURN(Value dict, values_.Dict());
  CKPT_RETURN_IF_ERROR(values_.SetItems(dict, items));
  DropMark();
  return Push(dict);
}

template <class Values>
Status PickleMachine<Values>::DoFrozenSet() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  CKPT_ASSIGN_OR_RETURN(Value set, values_.FrozenSet(items));
  DropMark();
  return Push(set);
}

template <class Values>
Status PickleMachine<Values>::DoAppend() {
  CKPT_ASSIGN_OR_RETURN(Value item, Pop());
  CKPT_ASSIGN_OR_RETURN(Value list, Top());
  return values_.Append(list, {&item, 1});
}

// The list, dict or set lies below the mark, but above the one before.
template <class Values>
Status PickleMachine<Values>::DoAppends() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  const std::vector<Value> kept(items.begin(), items.end());
  DropMark();
  CKPT_ASSIGN_OR_RETURN(Value list, Top());
  return values_.Append(list, kept);
}

template <class Values>
Status PickleMachine<Values>::DoSetItem() {
  CKPT_ASSIGN_OR_RETURN(Value value, Pop());
  CKPT_ASSIGN_OR_RETURN(Value key, Pop());
  CKPT_ASSIGN_OR_RETURN(Value dict, Top());
  const std::array<Value, 2> item = {key, value};
  return values_.SetItems(dict, item);
}

template <class Values>
Status PickleMachine<Values>::DoSetItems() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  if (items.size() % 2 != 0) return Refuse("a key without a value");
  const std::vector<Value> kept(items.begin(), items.end());
  DropMark();
  CKPT_ASSIGN_OR_RETURN(Value dict, Top());
  return values_.SetItems(dict, kept);
}

template <class Values>
Status PickleMachine<Values>::DoAddItems() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  const std::vector<Value> kept(items.begin(), items.end());
  DropMark();
  CKPT_ASSIGN_OR_RETURN(Value set, Top());
  return values_.AddItems(set, kept);
}

template <class Values>
Status PickleMachine<Values>::PushGlobal(std::string_view module, std::string_view name) {
  return Push(MakeGlobal(module, name));
}

template <class Values>
Status PickleMachine<Values>::DoGlobal() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  const std::string module(line);  // the next line may take the place of this one
  CKPT_ASSIGN_OR_RETURN(std::string_view name, input_.TakeLine());
  return PushGlobal(module, name);
}

template <class Values>
Status PickleMachine<Values>::DoStackGlobal() {
  CKPT_ASSIGN_OR_RETURN(Value name, Pop());
  CKPT_ASSIGN_OR_RETURN(Value module, Pop());
  CKPT_ASSIGN_OR_RETURN(const auto names, values_.NamesOf(module, name));
  if (names.first.find('\n') != std::string::npos || names.second.find('\n') != std::string::npos) {
    return Refuse("the name holds a line break");
  }
  return PushGlobal(names.first, names.second);
}

// INST and OBJ: a class called with what lies above the mark, or only made.
template <class Values>
Status PickleMachine<Values>::DoInst() {
  CKPT_RETURN_IF_ERROR(Marked());
  CKPT_RETURN_IF_ERROR(DoGlobal());
  CKPT_ASSIGN_OR_RETURN(Value cls, Pop());
  stack_.insert(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), cls);
  return DoObj();
}

template <class Values>
Status PickleMachine<Values>::DoObj() {
  CKPT_ASSIGN_OR_RETURN(const auto items, Marked());
  if (items.empty()) return Refuse("an object without a class");
  const Value cls = items.front();
  const bool called = items.size() > 1;
  CKPT_ASSIGN_OR_RETURN(Value arguments, values_.Tuple(items.subspan(1)));
  DropMark();
  return Push(called ? values_.Reduce(cls, arguments) : values_.Object(cls, arguments));
}

template <class Values>
Status PickleMachine<Values>::DoReduce() {
  CKPT_ASSIGN_OR_RETURN(Value arguments, Pop());
  CKPT_ASSIGN_OR_RETURN(Value callee, Pop());
  return Push(values_.Reduce(callee, arguments));
}

template <class Values>
Status PickleMachine<Values>::DoNewObj() {
  CKPT_ASSIGN_OR_RETURN(Value arguments, Pop());
  CKPT_ASSIGN_OR_RETURN(Value cls, Pop());
  return Push(values_.Object(cls, arguments));
}

template <class Values>
Status PickleMachine<Values>::DoNewObjEx() {
  CKPT_ASSIGN_OR_RETURN(Value keywords, Pop());
  CKPT_ASSIGN_OR_RETURN(Value arguments, Pop());
  CKPT_ASSIGN_OR_RETURN(Value cls, Pop());
  return Push(values_.Object(cls, arguments, &keywords));
}

template <class Values>
Status PickleMachine<Values>::DoBuild() {
  CKPT_ASSIGN_OR_RETURN(Value state, Pop());
  CKPT_ASSIGN_OR_RETURN(Value object, Top());
  return values_.Build(object, state);
}

template <class Values>
Status PickleMachine<Values>::DoPersId() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  CKPT_RETURN_IF_ERROR(PushString(line));
  return DoBinPersId();
}

template <class Values>
Status PickleMachine<Values>::DoBinPersId() {
  CKPT_ASSIGN_OR_RETURN(Value id, Pop());
  return Push(values_.Persistent(id));
}

template <class Values>
Status PickleMachine<Values>::DoRefuse() {
  return Refuse("extension codes and out-of-band buffers are not supported");
}

template <class Values>
Status PickleMachine<Values>::DoPut() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeIndex());
  return PutMemo(index);
}

template <class Values>
Status PickleMachine<Values>::DoBinPut() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(1));
  return PutMemo(index);
}

template <class Values>
Status PickleMachine<Values>::DoLongBinPut() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(4));
  return PutMemo(index);
}

template <class Values>
Status PickleMachine<Values>::DoMemoize() {
  return PutMemo(MemoSize());
}

template <class Values>
Status PickleMachine<Values>::DoGet() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeIndex());
  return GetMemo(index);
}

template <class Values>
Status PickleMachine<Values>::DoBinGet() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(1));
  return GetMemo(index);
}

template <class Values>
Status PickleMachine<Values>::DoLongBinGet() {
  CKPT_ASSIGN_OR_RETURN(uint64_t index, TakeInteger(4));
  return GetMemo(index);
}

template class PickleMachine<PickleTreeValues>;
template class PickleMachine<PackedValues>;

}  // namespace ckptfs
