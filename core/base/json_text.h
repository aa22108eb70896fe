// SPDX-License-Identifier: Apache-2.0
//
// These functions prepare JSON texts that nlohmann's parsers take otherwise than other readers do.
// The parsers take a NUL byte for the end and ignore the rest; they pass over a byte-order mark,
// which RFC 8259 and the readers of safetensors refuse; and they refuse the words that Python's
// json module writes for values that JSON does not have (NaN).  A text is put right, or refused,
// before they see it.
//
// Thread safety: pure.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

inline bool HasNul(std::string_view text) { return text.find('\0') != std::string_view::npos; }

inline bool HasByteOrderMark(std::string_view text) { return text.starts_with("\xEF\xBB\xBF"); }

// A text as Python's json.loads (3.11) takes it, for a parser of JSON: NaN, Infinity and
// -Infinity, and numbers beyond a double, are 0; half of a surrogate pair is U+FFFD.  As
// long as `text`.  Text that Python does not take as JSON either is returned unchanged.
std::string StrictJson(std::string_view text);

}  // namespace ckptfs
