// SPDX-License-Identifier: Apache-2.0
//
// Texts that have to be UTF-8, and names that need not be.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ckptfs {

struct Utf8Character {
  uint32_t code = 0;
  size_t bytes = 1;
  bool valid = false;
};

// The character that `text` begins with; one byte if it is not one.  REQUIRES: not empty.
Utf8Character FirstUtf8(std::string_view text);

// The longest prefix of at most `most` bytes that ends in the middle of no UTF-8 character.
inline std::string_view CutUtf8(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

// Any bytes as UTF-8, for JSON between our own processes: what is not a character becomes one of a
// private range, a byte each, and so do characters of that range.
std::string Utf8OfBytes(std::string_view bytes);
// Its inverse.
std::string BytesOfUtf8(std::string_view text);

}  // namespace ckptfs
