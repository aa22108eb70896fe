// SPDX-License-Identifier: Apache-2.0

#include <bit>
#include <charconv>

#include "core/base/strings.h"
#include "formats/torch/pickle/machine.h"
#include "formats/torch/pickle/text.h"

namespace ckptfs {

using Kind = PickleNode::Kind;

Status PickleMachine::PushInteger(int64_t value) {
  PickleNode node;
  node.kind = Kind::kInt;
  node.integer = value;
  return Push(std::move(node));
}

// Two's complement; trailing sign bytes that say nothing are dropped.
Status PickleMachine::PushLong(std::string_view little_endian) {
  std::string_view digits = little_endian;
  auto byte = [&](size_t i) { return static_cast<unsigned char>(digits[i]); };
  while (digits.size() > 1) {
    unsigned char last = byte(digits.size() - 1);
    bool negative = (byte(digits.size() - 2) & 0x80) != 0;
    if (last != (negative ? 0xff : 0)) break;
    digits.remove_suffix(1);
  }
  if (digits.size() > 8) return PushText(Kind::kBigInt, digits);
  uint64_t value = 0;
  for (size_t i = 0; i < digits.size(); ++i) value |= uint64_t{byte(i)} << (8 * i);
  if (!digits.empty() && digits.size() < 8 && (byte(digits.size() - 1) & 0x80) != 0) {
    value |= ~uint64_t{0} << (8 * digits.size());
  }
  return PushInteger(static_cast<int64_t>(value));
}

Status PickleMachine::PushText(Kind kind, std::string_view text) {
  PickleNode node;
  node.kind = kind;
  node.text = text;
  return Push(std::move(node));
}

// Python 2 strings may be either text or bytes.
Status PickleMachine::PushString(std::string_view text, bool may_be_bytes) {
  if (IsUtf8(text)) return PushText(Kind::kString, text);
  if (may_be_bytes) return PushText(Kind::kBytes, text);
  return Fail(Rule("the string is not UTF-8"));
}

Status PickleMachine::DoNone() { return PushShared(none_, Kind::kNone); }
Status PickleMachine::DoTrue() { return PushShared(true_, Kind::kBool, 1); }
Status PickleMachine::DoFalse() { return PushShared(false_, Kind::kBool, 0); }

Status PickleMachine::DoBinInt() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(4));
  return PushInteger(static_cast<int32_t>(static_cast<uint32_t>(value)));
}

Status PickleMachine::DoBinInt1() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(1));
  return PushInteger(static_cast<int64_t>(value));
}

Status PickleMachine::DoBinInt2() {
  CKPT_ASSIGN_OR_RETURN(uint64_t value, TakeInteger(2));
  return PushInteger(static_cast<int64_t>(value));
}

Status PickleMachine::DoInt() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  if (line == "00") return DoFalse();
  if (line == "01") return DoTrue();
  auto little_endian = ParseDecimal(line);
  if (!little_endian) return Fail(Rule("the operand is not a decimal integer"));
  return PushLong(*little_endian);
}

Status PickleMachine::DoLong() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  if (line.ends_with('L')) line.remove_suffix(1);
  if (line.size() > kMaxDecimalDigits) return Fail(Rule("more than 4300 decimal digits"));
  auto little_endian = ParseDecimal(line);
  if (!little_endian) return Fail(Rule("the operand is not a decimal integer"));
  return PushLong(*little_endian);
}

Status PickleMachine::DoLong1() {
  CKPT_ASSIGN_OR_RETURN(std::string_view digits, TakeSized(1));
  return PushLong(digits);
}

Status PickleMachine::DoLong4() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(4));
  if (length > 0x7fffffff) return Fail(Rule("a negative length"));
  CKPT_ASSIGN_OR_RETURN(std::string_view digits, Take(length));
  return PushLong(digits);
}

Status PickleMachine::DoFloat() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  PickleNode node;
  node.kind = Kind::kFloat;
  auto [end, code] = std::from_chars(line.data(), line.data() + line.size(), node.real);
  if (code != std::errc() || end != line.data() + line.size()) {
    return Fail(Rule("the operand is not a number"));
  }
  return Push(std::move(node));
}

Status PickleMachine::DoBinFloat() {
  CKPT_ASSIGN_OR_RETURN(std::string_view raw, Take(8));
  uint64_t bits = 0;
  for (char c : raw) bits = (bits << 8) | static_cast<unsigned char>(c);
  PickleNode node;
  node.kind = Kind::kFloat;
  node.real = std::bit_cast<double>(bits);
  return Push(std::move(node));
}

Status PickleMachine::DoString() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  if (line.size() < 2 || line.front() != line.back() ||
      (line.front() != '\'' && line.front() != '"')) {
    return Fail(Rule("the operand is not quoted"));
  }
  auto text = UnescapeString(line.substr(1, line.size() - 2));
  if (!text) return Fail(Rule("a bad escape"));
  return PushString(*text, true);
}

Status PickleMachine::DoBinString() {
  CKPT_ASSIGN_OR_RETURN(uint64_t length, TakeInteger(4));
  if (length > 0x7fffffff) return Fail(Rule("a negative length"));
  CKPT_ASSIGN_OR_RETURN(std::string_view text, Take(length));
  return PushString(text, true);
}

Status PickleMachine::DoShortBinString() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return PushString(text, true);
}

Status PickleMachine::DoUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view line, TakeLine());
  auto text = UnescapeRawUnicode(line);
  if (!text) return Fail(Rule("a bad escape"));
  return PushString(*text);
}

Status PickleMachine::DoBinUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(4));
  return PushString(text);
}

Status PickleMachine::DoShortBinUnicode() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return PushString(text);
}

Status PickleMachine::DoBinUnicode8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return PushString(text);
}

Status PickleMachine::DoBinBytes() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(4));
  return PushText(Kind::kBytes, text);
}

Status PickleMachine::DoShortBinBytes() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(1));
  return PushText(Kind::kBytes, text);
}

Status PickleMachine::DoBinBytes8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return PushText(Kind::kBytes, text);
}

Status PickleMachine::DoByteArray8() {
  CKPT_ASSIGN_OR_RETURN(std::string_view text, TakeSized(8));
  return PushText(Kind::kByteArray, text);
}

}  // namespace ckptfs
