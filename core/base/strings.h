// SPDX-License-Identifier: Apache-2.0
//
// StrCat joins strings and numbers into one std::string, a number by the fewest digits that tell
// it; IsDigit is of ASCII; Counted is "1 file", "3 files".
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace ckptfs {
namespace internal {
inline void AppendPiece(std::string& out, std::string_view text) { out += text; }
inline void AppendPiece(std::string& out, char letter) { out += letter; }
template <class T>
requires(std::is_integral_v<T> && !std::is_same_v<T, char>) void AppendPiece(std::string& out,
                                                                             T number) {
  out += std::to_string(number);
}
// Without it a double would become a letter.
void AppendPiece(std::string& out, double number);
}  // namespace internal

inline bool IsDigit(char letter) { return letter >= '0' && letter <= '9'; }

template <class... Pieces>
std::string StrCat(const Pieces&... pieces) {
  std::string out;
  (internal::AppendPiece(out, pieces), ...);
  return out;
}

// `many` of a noun that does not have an s.
inline std::string Counted(uint64_t count, std::string_view one, std::string_view many = {}) {
  if (count == 1 || !many.empty()) return StrCat(count, " ", count == 1 ? one : many);
  return StrCat(count, " ", one, "s");
}

}  // namespace ckptfs
