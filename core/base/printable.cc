// SPDX-License-Identifier: Apache-2.0

#include "core/base/printable.h"

#include <cstdint>

#include "core/base/utf8.h"

namespace ckptfs {
namespace {

bool Harmless(uint32_t code) {
  if (code < 0x20 || (code >= 0x7f && code < 0xa0)) return false;
  if (code >= 0x200b && code <= 0x200f) return false;  // of no width, marks of direction
  if (code >= 0x2028 && code <= 0x202e) return false;  // line separators, overrides
  if ((code & 0xfffe) == 0xfffe) return false;         // no characters, nor allowed in XML
  return !(code >= 0x2060 && code <= 0x206f) && code != 0xfeff && code != 0x61c;
}

}  // namespace

std::string Printable(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Character first = FirstUtf8(text);
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
