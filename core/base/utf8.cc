// SPDX-License-Identifier: Apache-2.0

#include "core/base/utf8.h"

#include <array>

namespace ckptfs {
namespace {

constexpr uint32_t kPrivate = 0x10fe00;  // plus a byte that is not ASCII

bool IsPrivate(const Utf8Character& one) {
  return one.valid && one.code >= kPrivate + 0x80 && one.code <= kPrivate + 0xff;
}

}  // namespace

Utf8Character FirstUtf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr std::array<uint32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < kLeast[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes, true};
}

std::string Utf8OfBytes(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const Utf8Character first = FirstUtf8(bytes);
    const std::string_view letters = bytes.substr(0, first.bytes);
    bytes.remove_prefix(first.bytes);
    if (first.valid && !IsPrivate(first)) {
      text += letters;
      continue;
    }
    for (const char letter : letters) {
      const uint32_t code = kPrivate + static_cast<uint8_t>(letter);
      text +=
          {static_cast<char>(0xf0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 0x3f)),
           static_cast<char>(0x80 | (code >> 6 & 0x3f)), static_cast<char>(0x80 | (code & 0x3f))};
    }
  }
  return text;
}

std::string BytesOfUtf8(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const Utf8Character first = FirstUtf8(text);
    if (IsPrivate(first)) {
      bytes += static_cast<char>(first.code - kPrivate);
    } else {
      bytes += text.substr(0, first.bytes);
    }
    text.remove_prefix(first.bytes);
  }
  return bytes;
}

}  // namespace ckptfs
