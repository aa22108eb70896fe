// SPDX-License-Identifier: Apache-2.0

#include "mount/shell_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/base/printable.h"

namespace ckptfs {
namespace {

bool NeedsNoQuotes(char letter) {
  const auto byte = static_cast<unsigned char>(letter);
  constexpr std::string_view kPlain = "_@%+=:,./-";
  return byte < 0x80 && (std::isalnum(byte) != 0 || kPlain.find(letter) != std::string_view::npos);
}

}  // namespace

std::string SingleQuoted(std::string_view text) {
  std::string out = "'";
  for (const char letter : text) {
    if (letter == '\'') {
      out += "'\\''";
    } else {
      out += letter;
    }
  }
  return out + "'";
}

std::string ShellWord(std::string_view word) {
  if (!word.empty() && std::all_of(word.begin(), word.end(), NeedsNoQuotes))
    return std::string(word);
  if (Printable(word) == word) return SingleQuoted(word);
  std::string out = "$'";
  for (const char letter : word) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == '\'' || letter == '\\') {
      out += {'\\', letter};
    } else if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += letter;
    }
  }
  return out + "'";
}

}  // namespace ckptfs
