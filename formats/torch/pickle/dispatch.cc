// SPDX-License-Identifier: Apache-2.0

#include <array>

#include "core/base/strings.h"
#include "formats/torch/pickle/machine.h"

namespace ckptfs {

struct PickleHandlers {
  using M = PickleMachine;
  struct Entry {
    Op op;
    M::Handler handler;
  };
  static constexpr Entry kEntries[] = {
      {Op::kMark, &M::DoMark}, {Op::kStop, &M::DoStop}, {Op::kPop, &M::DoPop},
      {Op::kPopMark, &M::DoPopMark}, {Op::kDup, &M::DoDup}, {Op::kFloat, &M::DoFloat},
      {Op::kInt, &M::DoInt}, {Op::kBinInt, &M::DoBinInt}, {Op::kBinInt1, &M::DoBinInt1},
      {Op::kLong, &M::DoLong}, {Op::kBinInt2, &M::DoBinInt2}, {Op::kNone, &M::DoNone},
      {Op::kPersId, &M::DoPersId}, {Op::kBinPersId, &M::DoBinPersId}, {Op::kReduce, &M::DoReduce},
      {Op::kString, &M::DoString}, {Op::kBinString, &M::DoBinString},
      {Op::kShortBinString, &M::DoShortBinString}, {Op::kUnicode, &M::DoUnicode},
      {Op::kBinUnicode, &M::DoBinUnicode}, {Op::kAppend, &M::DoAppend}, {Op::kBuild, &M::DoBuild},
      {Op::kGlobal, &M::DoGlobal}, {Op::kDict, &M::DoDict}, {Op::kEmptyDict, &M::DoEmptyDict},
      {Op::kAppends, &M::DoAppends}, {Op::kGet, &M::DoGet}, {Op::kBinGet, &M::DoBinGet},
      {Op::kInst, &M::DoInst}, {Op::kLongBinGet, &M::DoLongBinGet}, {Op::kList, &M::DoList},
      {Op::kEmptyList, &M::DoEmptyList}, {Op::kObj, &M::DoObj}, {Op::kPut, &M::DoPut},
      {Op::kBinPut, &M::DoBinPut}, {Op::kLongBinPut, &M::DoLongBinPut},
      {Op::kSetItem, &M::DoSetItem}, {Op::kTuple, &M::DoTuple},
      {Op::kEmptyTuple, &M::DoEmptyTuple}, {Op::kSetItems, &M::DoSetItems},
      {Op::kBinFloat, &M::DoBinFloat}, {Op::kProto, &M::DoProto}, {Op::kNewObj, &M::DoNewObj},
      {Op::kExt1, &M::DoRefuse}, {Op::kExt2, &M::DoRefuse}, {Op::kExt4, &M::DoRefuse},
      {Op::kTuple1, &M::DoTuple1}, {Op::kTuple2, &M::DoTuple2}, {Op::kTuple3, &M::DoTuple3},
      {Op::kNewTrue, &M::DoTrue}, {Op::kNewFalse, &M::DoFalse}, {Op::kLong1, &M::DoLong1},
      {Op::kLong4, &M::DoLong4}, {Op::kBinBytes, &M::DoBinBytes},
      {Op::kShortBinBytes, &M::DoShortBinBytes}, {Op::kShortBinUnicode, &M::DoShortBinUnicode},
      {Op::kBinUnicode8, &M::DoBinUnicode8}, {Op::kBinBytes8, &M::DoBinBytes8},
      {Op::kEmptySet, &M::DoEmptySet}, {Op::kAddItems, &M::DoAddItems},
      {Op::kFrozenSet, &M::DoFrozenSet}, {Op::kNewObjEx, &M::DoNewObjEx},
      {Op::kStackGlobal, &M::DoStackGlobal}, {Op::kMemoize, &M::DoMemoize},
      {Op::kFrame, &M::DoFrame}, {Op::kByteArray8, &M::DoByteArray8},
      {Op::kNextBuffer, &M::DoRefuse}, {Op::kReadOnlyBuffer, &M::DoRefuse},
  };
  static constexpr std::array<M::Handler, 256> kTable = [] {
    std::array<M::Handler, 256> table{};
    for (const Entry& entry : kEntries) table[static_cast<unsigned char>(entry.op)] = entry.handler;
    return table;
  }();
};

Result<ParsedPickle> PickleMachine::Run() && {
  while (!stopped_) {
    opcode_at_ = position_;
    if (position_ >= bytes_.size()) {
      return Fail(ErrorCode::kInvalid, StrCat("the pickle ends at byte ", position_,
                                              " without a STOP opcode"));
    }
    Handler handler = PickleHandlers::kTable[static_cast<unsigned char>(bytes_[position_++])];
    if (handler == nullptr) return Fail(Rule("no such opcode"));
    CKPT_RETURN_IF_ERROR((this->*handler)());
  }
  return ParsedPickle{std::move(tree_), position_};
}

Result<ParsedPickle> ParsePickle(std::string_view bytes) {
  return PickleMachine(bytes).Run();
}

}  // namespace ckptfs
