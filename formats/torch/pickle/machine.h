// SPDX-License-Identifier: Apache-2.0
//
// PickleMachine is the virtual machine behind ParsePickle: a stack of node
// ids, marks and a memo.  Handlers of one opcode each, found by a table;
// scalars in scalars.cc, containers and calls in machine.cc, the table and the
// loop in dispatch.cc.
//
// Thread safety: none; one machine parses one pickle.
// Lifetime: `bytes` must outlive the machine; nodes copy what they keep.

#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/torch/pickle/opcodes.h"
#include "formats/torch/pickle_reader.h"

namespace ckptfs {

class PickleMachine {
 public:
  // More than `max_nodes` values are refused.
  explicit PickleMachine(std::string_view bytes, size_t max_nodes = kMaxPickleNodes)
      : bytes_(bytes), max_nodes_(max_nodes) {}
  Result<ParsedPickle> Run() &&;

  using Handler = Status (PickleMachine::*)();

 private:
  friend struct PickleHandlers;  // the table

  // Operands.
  Result<std::string_view> Take(uint64_t length);
  Result<uint64_t> TakeInteger(int width);  // little-endian
  Result<std::string_view> TakeLine();      // without its newline
  Result<std::string_view> TakeSized(int width);

  // Stack; no pop reaches below the latest mark.
  Status Push(PickleNode node);
  Status PushId(NodeId id);
  Status PushShared(NodeId& shared, PickleNode::Kind kind, int64_t integer = 0);
  Status PushText(PickleNode::Kind kind, std::string_view text);
  Status PushString(std::string_view text, bool may_be_bytes = false);
  Status PushInteger(int64_t value);
  Status PushLong(std::string_view little_endian);
  Result<NodeId> Pop();
  Result<NodeId> Top();
  Result<std::vector<NodeId>> PopMark();
  Status PutMemo(uint64_t index);
  Status GetMemo(uint64_t index);

  // Calls.
  Status PushGlobal(std::string_view module, std::string_view name);
  Status PushReduce(NodeId callee, NodeId arguments);
  Status PushPersistent(NodeId id);
  Status Charge(const PickleNode& node);
  Result<NodeId> AddTuple(std::vector<NodeId> items);
  Status AppendTo(const std::vector<NodeId>& items);
  Status SetItemsOf(const std::vector<NodeId>& items);

  Error Rule(std::string_view rule) const;  // with opcode and offset

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

  static constexpr NodeId kNoNode = ~NodeId{0};

  std::string_view bytes_;
  size_t max_nodes_;
  size_t position_ = 0;
  size_t opcode_at_ = 0;
  int protocol_ = 0;
  bool stopped_ = false;
  PickleTree tree_;
  std::vector<NodeId> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, NodeId> memo_;
  uint64_t charged_ = 0;  // bytes that calls made nodes copy
  NodeId none_ = kNoNode;
  NodeId true_ = kNoNode;
  NodeId false_ = kNoNode;
  NodeId empty_tuple_ = kNoNode;
};

}  // namespace ckptfs
