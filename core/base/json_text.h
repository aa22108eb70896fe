// SPDX-License-Identifier: Apache-2.0
//
// nlohmann's parsers take a NUL byte for the end of a text, and nobody looks at what stands
// behind it: a text with one is refused before they see it.
//
// Thread safety: pure.

#pragma once

#include <string_view>

namespace ckptfs {

inline bool HasNul(std::string_view text) { return text.find('\0') != std::string_view::npos; }

}  // namespace ckptfs
