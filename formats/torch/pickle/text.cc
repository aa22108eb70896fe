// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/text.h"

#include <algorithm>

#include "formats/torch/pickle/opcodes.h"

namespace ckptfs {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// `digits` hexadecimal digits at `at`.
std::optional<uint32_t> Hex(std::string_view text, size_t at, size_t digits) {
  if (text.size() - at < digits) return std::nullopt;
  uint32_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    int digit = HexDigit(text[at + i]);
    if (digit < 0) return std::nullopt;
    value = value * 16 + static_cast<uint32_t>(digit);
  }
  return value;
}

// Length of the sequence that a lead byte announces, 0 if it is not one.
size_t SequenceLength(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

// An octal escape of up to three digits; advances `i` past it.
char Octal(std::string_view text, size_t& i) {
  unsigned value = 0;
  for (int n = 0; n < 3 && i < text.size() && text[i] >= '0' && text[i] <= '7'; ++n, ++i) {
    value = value * 8 + static_cast<unsigned>(text[i] - '0');
  }
  return static_cast<char>(value);
}

}  // namespace

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    unsigned char lead = static_cast<unsigned char>(text[i]);
    size_t length = SequenceLength(lead);
    if (length == 0 || text.size() - i < length) return false;
    for (size_t k = 1; k < length; ++k) {
      if ((static_cast<unsigned char>(text[i + k]) & 0xc0) != 0x80) return false;
    }
    unsigned char second = length > 1 ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (lead == 0xe0 && second < 0xa0) return false;  // overlong
    if (lead == 0xf0 && second < 0x90) return false;
    if (lead == 0xf4 && second > 0x8f) return false;  // above 0x10ffff
    i += length;
  }
  return true;
}

void AppendUtf8(std::string& out, uint32_t code_point) {
  auto put = [&](uint32_t byte) { out += static_cast<char>(byte); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xc0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3f));
  } else if (code_point < 0x10000) {
    put(0xe0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  } else {
    put(0xf0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3f));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  }
}

std::optional<std::string> ParseDecimal(std::string_view text) {
  bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.size() > kMaxDecimalDigits) return std::nullopt;
  std::string magnitude(1, '\0');  // little-endian
  for (char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    unsigned carry = static_cast<unsigned>(c - '0');
    for (char& byte : magnitude) {
      carry += static_cast<unsigned char>(byte) * 10u;
      byte = static_cast<char>(carry & 0xff);
      carry >>= 8;
    }
    if (carry != 0) magnitude += static_cast<char>(carry);
  }
  magnitude += '\0';  // room for the sign
  if (!negative) return magnitude;
  unsigned carry = 1;
  for (char& byte : magnitude) {
    carry += static_cast<unsigned char>(~byte);
    byte = static_cast<char>(carry & 0xff);
    carry >>= 8;
  }
  return magnitude;
}

std::optional<std::string> UnescapeString(std::string_view text) {
  constexpr std::string_view kLetters = "\\'\"abfnrtv";
  constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (text[i] != '\\') {
      out += text[i++];
      continue;
    }
    if (++i == text.size()) return std::nullopt;
    char c = text[i];
    if (size_t which = kLetters.find(c); which != std::string_view::npos) {
      out += kMeanings[which];
      ++i;
    } else if (c == 'x') {
      auto value = Hex(text, i + 1, 2);
      if (!value) return std::nullopt;
      out += static_cast<char>(*value);
      i += 3;
    } else if (c >= '0' && c <= '7') {
      out += Octal(text, i);
    } else {
      out += '\\';  // Python keeps an unknown escape
    }
  }
  return out;
}

std::optional<std::string> UnescapeRawUnicode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    bool escape =
        text[i] == '\\' && i + 1 < text.size() && (text[i + 1] == 'u' || text[i + 1] == 'U');
    if (!escape) {
      AppendUtf8(out, static_cast<unsigned char>(text[i++]));
      continue;
    }
    size_t digits = text[i + 1] == 'u' ? 4 : 8;
    auto value = Hex(text, i + 2, digits);
    if (!value || *value > 0x10ffff) return std::nullopt;
    AppendUtf8(out, *value);
    i += 2 + digits;
  }
  return out;
}

std::string Latin1ToUtf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  for (char c : bytes) AppendUtf8(out, static_cast<unsigned char>(c));
  return out;
}

}  // namespace ckptfs
