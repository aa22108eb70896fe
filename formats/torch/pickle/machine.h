// SPDX-License-Identifier: Apache-2.0
//
// PickleMachine is the virtual machine of pickle protocols 0-5: opcodes, their operands,
// a stack, marks and a memo.  Its Values decide what a value is: a node of a tree
// (tree_values.h), or a word from which objects are told as soon as they are whole
// (packed_values.h).  Handlers of one opcode each, found by a table; scalars in
// scalars.cc, containers and calls in machine.cc, the table and the loop in dispatch.cc.
//
//   Values::Value                     copied freely; what stack and memo hold
//   None, Bool, Int, BigInt, Float, String, Bytes, ByteArray, Tuple, List, Dict, Set,
//   FrozenSet, Global, Reduce, Object, Persistent    -> Result<Value>
//   Append, SetItems, AddItems, Build                -> Status, of a value that was made
//   NamesOf(module, name)             what two strings say (STACK_GLOBAL)
//   kMaxMemo                          entries of the memo, of the stack and of marks
//
// Errors say the rule; Run adds the opcode and where it is.
//
// Thread safety: none; one machine parses one pickle.
// Lifetime: input and values must outlive the machine.

#pragma once

#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/result.h"
#include "formats/torch/pickle/opcodes.h"
#include "formats/torch/pickle/pickle_input.h"

namespace ckptfs {

template <class Values>
class PickleMachine {
 public:
  using Value = typename Values::Value;

  PickleMachine(PickleInput& input, Values& values) : input_(input), values_(values) {}
  // The value that STOP leaves.  kInvalid names the opcode, its offset and the rule.
  Result<Value> Run() &&;

  using Handler = Status (PickleMachine::*)();

 private:
  template <class V>
  friend struct PickleHandlers;  // the table

  // Operands.
  Result<uint64_t> TakeInteger(int width);  // little-endian
  Result<std::string_view> TakeSized(int width);
  Result<uint64_t> TakeIndex();  // of the memo, in decimal

  // Stack; no pop reaches below the latest mark.
  Status Push(Result<Value> value);
  Status PushString(std::string_view text, bool may_be_bytes = false);
  Status PushLong(std::string_view little_endian);
  Result<Value> Pop();
  Result<Value> Top();
  // The values above the latest mark; DropMark takes them off.
  Result<std::span<const Value>> Marked();
  void DropMark();
  Status PutMemo(uint64_t index);
  Status GetMemo(uint64_t index);
  Status PushTuple(size_t count);
  Status PushGlobal(std::string_view module, std::string_view name);
  Result<Value> MakeGlobal(std::string_view module, std::string_view name);
  size_t MemoSize() const { return memo_.size() + scattered_.size(); }

  // Opcodes: containers and calls.
  Status DoMark();
  Status DoStop();
  Status DoPop();
  Status DoPopMark();
  Status DoDup();
  Status DoProto();
  Status DoFrame();
  Status DoTuple();
  Status DoTuple1();
  Status DoTuple2();
  Status DoTuple3();
  Status DoEmptyTuple();
  Status DoEmptyList();
  Status DoEmptyDict();
  Status DoEmptySet();
  Status DoList();
  Status DoDict();
  Status DoFrozenSet();
  Status DoAppend();
  Status DoAppends();
  Status DoSetItem();
  Status DoSetItems();
  Status DoAddItems();
  Status DoGlobal();
  Status DoStackGlobal();
  Status DoInst();
  Status DoObj();
  Status DoReduce();
  Status DoNewObj();
  Status DoNewObjEx();
  Status DoBuild();
  Status DoPersId();
  Status DoBinPersId();
  Status DoRefuse();
  // Memo.
  Status DoPut();
  Status DoBinPut();
  Status DoLongBinPut();
  Status DoMemoize();
  Status DoGet();
  Status DoBinGet();
  Status DoLongBinGet();
  // Scalars.
  Status DoNone();
  Status DoTrue();
  Status DoFalse();
  Status DoBinInt();
  Status DoBinInt1();
  Status DoBinInt2();
  Status DoInt();
  Status DoLong();
  Status DoLong1();
  Status DoLong4();
  Status DoFloat();
  Status DoBinFloat();
  Status DoString();
  Status DoBinString();
  Status DoShortBinString();
  Status DoUnicode();
  Status DoBinUnicode();
  Status DoShortBinUnicode();
  Status DoBinUnicode8();
  Status DoBinBytes();
  Status DoShortBinBytes();
  Status DoBinBytes8();
  Status DoByteArray8();

  PickleInput& input_;
  Values& values_;
  int protocol_ = 0;
  bool stopped_ = false;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  // Picklers number their memos from 0; any other index is kept apart.
  std::vector<Value> memo_;
  std::unordered_map<uint64_t, Value> scattered_;
};

}  // namespace ckptfs
