// SPDX-License-Identifier: Apache-2.0

#include "core/base/printable.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace ckptfs {
namespace {

struct Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool valid = false;
};

// The UTF-8 character that `text` begins with; one byte if it is none.
Character FirstOf(std::string_view text) {
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

bool Harmless(uint32_t code) {
  if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return false;
  if (code >= 0x200b && code <= 0x200f) return false;   // of no width, marks of direction
  if (code >= 0x2028 && code <= 0x202e) return false;   // line separators, overrides
  if ((code & 0xfffe) == 0xfffe) return false;          // no characters, nor allowed in XML
  return !(code >= 0x2060 && code <= 0x206f) && code != 0xfeff && code != 0x61c;
}

}  // namespace

std::string Printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character first = FirstOf(text);
    const std::string_view bytes = text.substr(0, first.bytes);
    text.remove_prefix(first.bytes);
    if (first.valid && Harmless(first.code)) {
      out += bytes;
      continue;
    }
    for (const char letter : bytes) {
      const auto byte = static_cast<uint8_t>(letter);
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out;
}

}  // namespace ckptfs
