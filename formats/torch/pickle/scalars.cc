// SPDX-License-Identifier: Apache-2.0

#include <bit>
#include <charconv>

#include "core/base/strings.h"
#include "formats/torch/pickle/machine.h"
#include "formats/torch/pickle/packed_values.h"
#include "formats/torch/pickle/text.h"
#include "formats/torch/pickle/tree_values.h"

namespace ckptfs {

// Two's complement; trailing sign bytes that say nothing are dropped.
template <class Values>
Status PickleMachine<Values>::PushLong(std::string_view little_endian) {
  std::string_view digits = little_endian;
  auto byte = [&](size_t i) { return static_cast<unsigned char>(digits[i]); };
  while (digits.size() > 1) {
    unsigned char last = byte(digits.size() - 1);
    bool negative = (byte(digits.size() - 2) & 0x80) != 0;
    if (last != (negative ? 0xff : 0)) break;
    digits.remove_suffix(1);
  }
  if (digits.size() > 8) return Push(values_.BigInt(digits));
  uint64_t value = 0;
  for (size_t i = 0; i < digits.size(); ++i) value |= uint64_t{byte(i)} << (8 * i);
  if (!digits.empty() && digits.size() < 8 && (byte(digits.size() - 1) & 0x80) != 0) {
    value |= ~uint64_t{0} << (8 * digits.size());
  }
  return Push(values_.Int(static_cast<int64_t>(value)));
}

// Python 2 strings may be either text or bytes.
template <class Values>
Status PickleMachine<Values>::PushString(std::string_view text, bool may_be_bytes) {
  if (IsUtf8(text)) return Push(values_.String(text));
  if (may_be_bytes) return Push(values_.Bytes(text));
  return Refuse("the string is not UTF-8");
}

template <class Values>
Status PickleMachine<Values>::DoNone() {
  return Push(values_.None());
}
template <class Values>
Status PickleMachine<Values>::DoTrue() {
  return Push(values_.Bool(true));
}
template <class Values>
Status PickleMachine<Values>::DoFalse() {
  return Push(values_.Bool(false));
}

template <class Values>
Status PickleMachine<Values>::DoBinInt() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(4));
  return Push(values_.Int(static_cast<int32_t>(static_cast<uint32_t>(value))));
}

template <class Values>
Status PickleMachine<Values>::DoBinInt1() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(1));
  return Push(values_.Int(static_cast<int64_t>(value)));
}

template <class Values>
Status PickleMachine<Values>::DoBinInt2() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(2));
  return Push(values_.Int(static_cast<int64_t>(value)));
}

template <class Values>
Status PickleMachine<Values>::DoInt() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  if (line == "00") return DoFalse();
  if (line == "01") return DoTrue();
  auto little_endian = ParseDecimal(line);
  if (!little_endian) return Refuse("the operand is not a decimal integer");
  return PushLong(*little_endian);
}

template <class Values>
Status PickleMachine<Values>::DoLong() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  if (line.ends_with('L')) line.remove_suffix(1);
  if (line.size() > kMaxDecimalDigits) return Refuse("more than 4300 decimal digits");
  auto little_endian = ParseDecimal(line);
  if (!little_endian) return Refuse("the operand is not a decimal integer");
  return PushLong(*little_endian);
}

template <class Values>
Status PickleMachine<Values>::DoLong1() {
  CKPT_ASSIGN_OR_RETURN(std::string_view digits, TakeSized(1));
  return PushLong(digits);
}

template <class Values>
Status PickleMachine<Values>::DoLong4() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(4));
  if (length > 0x7fffffff) return Refuse("a negative length");
  CKPT_ASSIGN_OR_RETURN(std::string_view digits, input_.Take(length));
  return PushLong(digits);
}

template <class Values>
Status PickleMachine<Values>::DoFloat() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  double real = 0;
  auto [end, code] = std::from_chars(line.data(), line.data() + line.size(), real);
  if (code != std::errc() || end != line.data() + line.size()) {
    return Refuse("the operand is not a number");
  }
  return Push(values_.Float(real));
}

template <class Values>
Status PickleMachine<Values>::DoBinFloat() {
  CKPT_ASSIGN_OR_RETURN(std::string_view raw, input_.Take(8));
  uint64_t bits = 0;
  for (char c : raw) bits = (bits << 8) | static_cast<unsigned char>(c);
  return Push(values_.Float(std::bit_cast<double>(bits)));
}

template <class Values>
Status PickleMachine<Values>::DoString() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  if (line.size() < 2 || line.front() != line.back() ||
      (line.front() != '\'' && line.front() != '"')) {
    return Refuse("the operand is not quoted");
  }
  auto text = UnescapeString(line.substr(1, line.size() - 2));
  if (!text) return Refuse("a bad escape");
  return PushString(*text, true);
}

template <class Values>
Status PickleMachine<Values>::DoBinString() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(4));
  if (length > 0x7fffffff) return Refuse("a negative length");
  CKPT_ASSIGN_OR_RETURN(std::string_view text, input_.Take(length));
  return PushString(text, true);
}

template <class Values>
Status PickleMachine<Values>::DoShortBinString() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return PushString(text, true);
}

template <class Values>
Status PickleMachine<Values>::DoUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, input_.TakeLine());
  auto text = UnescapeRawUnicode(line);
  if (!text) return Refuse("a bad escape");
  return PushString(*text);
}

template <class Values>
Status PickleMachine<Values>::DoBinUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(4));
  return PushString(text);
}

template <class Values>
Status PickleMachine<Values>::DoShortBinUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return PushString(text);
}

template <class Values>
Status PickleMachine<Values>::DoBinUnicode8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return PushString(text);
}

template <class Values>
Status PickleMachine<Values>::DoBinBytes() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(4));
  return Push(values_.Bytes(text));
}

template <class Values>
Status PickleMachine<Values>::DoShortBinBytes() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return Push(values_.Bytes(text));
}

template <class Values>
Status PickleMachine<Values>::DoBinBytes8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return Push(values_.Bytes(text));
}

template <class Values>
Status PickleMachine<Values>::DoByteArray8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return Push(values_.ByteArray(text));
}

template class PickleMachine<PickleTreeValues>;
template class PickleMachine<PackedValues>;

}  // namespace ckptfs
