// SPDX-License-Identifier: Apache-2.0

#include <array>

#include "core/base/strings.h"
#include "formats/torch/pickle/machine.h"
#include "formats/torch/pickle/packed_values.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle/tree_values.h"

namespace ckptfs {

template <class Values>
struct PickleHandlers {
  using M = PickleMachine<Values>;
  struct Entry {
    Op op;
    typename M::Handler handler;
  };
  static constexpr Entry kEntries[] = {
      {Op::kMark, &M::DoMark},
      {Op::kStop, &M::DoStop},
      {Op::kPop, &M::DoPop},
      {Op::kPopMark, &M::DoPopMark},
      {Op::kDup, &M::DoDup},
      {Op::kFloat, &M::DoFloat},
      {Op::kInt, &M::DoInt},
      {Op::kBinInt, &M::DoBinInt},
      {Op::kBinInt1, &M::DoBinInt1},
      {Op::kLong, &M::DoLong},
      {Op::kBinInt2, &M::DoBinInt2},
      {Op::kNone, &M::DoNone},
      {Op::kPersId, &M::DoPersId},
      {Op::kBinPersId, &M::DoBinPersId},
      {Op::kReduce, &M::DoReduce},
      {Op::kString, &M::DoString},
      {Op::kBinString, &M::DoBinString},
      {Op::kShortBinString, &M::DoShortBinString},
      {Op::kUnicode, &M::DoUnicode},
      {Op::kBinUnicode, &M::DoBinUnicode},
      {Op::kAppend, &M::DoAppend},
      {Op::kBuild, &M::DoBuild},
      {Op::kGlobal, &M::DoGlobal},
      {Op::kDict, &M::DoDict},
      {Op::kEmptyDict, &M::DoEmptyDict},
      {Op::kAppends, &M::DoAppends},
      {Op::kGet, &M::DoGet},
      {Op::kBinGet, &M::DoBinGet},
      {Op::kInst, &M::DoInst},
      {Op::kLongBinGet, &M::DoLongBinGet},
      {Op::kList, &M::DoList},
      {Op::kEmptyList, &M::DoEmptyList},
      {Op::kObj, &M::DoObj},
      {Op::kPut, &M::DoPut},
      {Op::kBinPut, &M::DoBinPut},
      {Op::kLongBinPut, &M::DoLongBinPut},
      {Op::kSetItem, &M::DoSetItem},
      {Op::kTuple, &M::DoTuple},
      {Op::kEmptyTuple, &M::DoEmptyTuple},
      {Op::kSetItems, &M::DoSetItems},
      {Op::kBinFloat, &M::DoBinFloat},
      {Op::kProto, &M::DoProto},
      {Op::kNewObj, &M::DoNewObj},
      {Op::kExt1, &M::DoRefuse},
      {Op::kExt2, &M::DoRefuse},
      {Op::kExt4, &M::DoRefuse},
      {Op::kTuple1, &M::DoTuple1},
      {Op::kTuple2, &M::DoTuple2},
      {Op::kTuple3, &M::DoTuple3},
      {Op::kNewTrue, &M::DoTrue},
      {Op::kNewFalse, &M::DoFalse},
      {Op::kLong1, &M::DoLong1},
      {Op::kLong4, &M::DoLong4},
      {Op::kBinBytes, &M::DoBinBytes},
      {Op::kShortBinBytes, &M::DoShortBinBytes},
      {Op::kShortBinUnicode, &M::DoShortBinUnicode},
      {Op::kBinUnicode8, &M::DoBinUnicode8},
      {Op::kBinBytes8, &M::DoBinBytes8},
      {Op::kEmptySet, &M::DoEmptySet},
      {Op::kAddItems, &M::DoAddItems},
      {Op::kFrozenSet, &M::DoFrozenSet},
      {Op::kNewObjEx, &M::DoNewObjEx},
      {Op::kStackGlobal, &M::DoStackGlobal},
      {Op::kMemoize, &M::DoMemoize},
      {Op::kFrame, &M::DoFrame},
      {Op::kByteArray8, &M::DoByteArray8},
      {Op::kNextBuffer, &M::DoRefuse},
      {Op::kReadOnlyBuffer, &M::DoRefuse},
  };
  static constexpr std::array<typename M::Handler, 256> kTable = [] {
    std::array<typename M::Handler, 256> table{};
    for (const Entry& entry : kEntries) table[static_cast<unsigned char>(entry.op)] = entry.handler;
    return table;
  }();
};

namespace {

Error AtOpcode(Error error, unsigned char opcode, uint64_t at) {
  constexpr std::string_view kHex = "0123456789abcdef";
  return std::move(error).WithContext(
      StrCat("pickle opcode 0x", kHex[opcode >> 4], kHex[opcode & 15], " at byte ", at));
}

}  // namespace

template <class Values>
auto PickleMachine<Values>::Run() && -> Result<Value> {
  while (!stopped_) {
    const uint64_t at = input_.position();
    if (at >= input_.size()) {
      return Refuse("the pickle ends at byte ", at, " without a STOP opcode");
    }
    CKPT_ASSIGN_OR_RETURN(const std::string_view opcode, input_.Take(1));
    const auto code = static_cast<unsigned char>(opcode.front());
    const Handler handler = PickleHandlers<Values>::kTable[code];
    if (handler == nullptr)
      return Fail(AtOpcode(Error{ErrorCode::kInvalid, "no such opcode"}, code, at));
    if (Status done = (this->*handler)(); !done) [[unlikely]] {
      return Fail(AtOpcode(std::move(done).error(), code, at));
    }
  }
  return stack_.back();
}

template class PickleMachine<PickleTreeValues>;
template class PickleMachine<PackedValues>;

Result<ParsedPickle> ParsePickle(std::string_view bytes, size_t max_nodes) {
  PickleInput input(bytes);
  PickleTreeValues values(bytes.size(), max_nodes);
  CKPT_ASSIGN_OR_RETURN(const NodeId root, PickleMachine(input, values).Run());
  return ParsedPickle{std::move(values).Finish(root), static_cast<size_t>(input.position())};
}

}  // namespace ckptfs
