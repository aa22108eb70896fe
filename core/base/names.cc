// SPDX-License-Identifier: Apache-2.0
#include "core/base/names.h"

#include "core/base/strings.h"

namespace ckptfs {

Status CheckName(std::string_view name, std::string_view what) {
  constexpr size_t kMaxName = 200;
  auto refuse = [&](std::string_view rule) {
    return Fail(ErrorCode::kInvalid, StrCat(what, " name: ", rule));
  };
  if (name.empty()) return refuse("empty");
  if (name.size() > kMaxName) return refuse("longer than 200 bytes");
  if (name == "." || name == "..") return refuse("'.' and '..' are taken");
  for (char letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == '/') return refuse("holds a '/'");
    if (byte < 0x20 || byte == 0x7f) return refuse("holds a control character");
  }
  return {};
}

}  // namespace ckptfs
