// SPDX-License-Identifier: Apache-2.0
//
// Text that is cut to a length of bytes.
//
// Thread safety: pure function.
// Units: bytes.

#pragma once

#include <cstddef>
#include <string_view>

namespace ckptfs {

// The longest prefix of at most `most` bytes that ends in the middle of no UTF-8 character.
inline std::string_view CutUtf8(std::string_view text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

}  // namespace ckptfs
