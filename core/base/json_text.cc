// SPDX-License-Identifier: Apache-2.0

#include "core/base/json_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <system_error>

namespace ckptfs {
namespace {

constexpr std::array<std::string_view, 3> kWords = {"NaN", "Infinity", "-Infinity"};
constexpr size_t kEscape = 6;  // \uXXXX
constexpr std::string_view kReplacement = "\\ufffd";

// The unit of the escape at the beginning of `text`; 0 of anything else.
uint32_t UnitOf(std::string_view text) {
  uint32_t unit = 0;
  if (text.size() < kEscape || !text.starts_with("\\u")) return 0;
  const auto [end, error] = std::from_chars(text.data() + 2, text.data() + kEscape, unit, 16);
  return error == std::errc() && end == text.data() + kEscape ? unit : 0;
}

bool IsHigh(uint32_t unit) { return unit >= 0xD800 && unit < 0xDC00; }
bool IsLow(uint32_t unit) { return unit >= 0xDC00 && unit < 0xE000; }

// How long the escape at the beginning of `text` is, with what it is a pair with.
size_t PutEscapeRight(std::string_view text, char* out) {
  const uint32_t unit = UnitOf(text);
  if (!IsHigh(unit) && !IsLow(unit)) return 2;
  if (IsHigh(unit) && IsLow(UnitOf(text.substr(kEscape)))) return 2 * kEscape;
  std::ranges::copy(kReplacement, out);
  return kEscape;
}

// How long the word or number at the beginning of `text` is; 0 if there is none.
size_t PutNumberRight(std::string_view text, char* out) {
  const auto blank = [&](size_t length) {
    std::fill_n(out, length, ' ');
    *out = '0';
    return length;
  };
  for (const std::string_view word : kWords) {
    if (text.starts_with(word)) return blank(word.size());
  }
  const size_t length = std::min(text.find_first_not_of("0123456789+-.eE"), text.size());
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + length, value);
  const bool beyond =
      parsed.ec == std::errc::result_out_of_range && parsed.ptr == text.data() + length;
  return beyond ? blank(length) : length;
}

}  // namespace

std::string StrictJson(std::string_view text) {
  std::string out(text);
  bool quoted = false;
  for (size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    size_t length = 1;
    if (rest.front() == '"') quoted = !quoted;
    if (quoted && rest.front() == '\\') length = PutEscapeRight(rest, &out[at]);
    if (!quoted && rest.front() != '"') length = std::max(PutNumberRight(rest, &out[at]), length);
    at += length;
  }
  return out;
}

}  // namespace ckptfs
