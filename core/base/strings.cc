// SPDX-License-Identifier: Apache-2.0

#include "core/base/strings.h"

#include <array>
#include <charconv>

namespace ckptfs::internal {

void AppendPiece(std::string& out, double number) {
  std::array<char, 32> text;
  const auto [end, _] = std::to_chars(text.data(), text.data() + text.size(), number);
  out.append(text.data(), end);
}

}  // namespace ckptfs::internal
