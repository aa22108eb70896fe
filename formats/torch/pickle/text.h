// SPDX-License-Identifier: Apache-2.0
//
// The text forms inside pickles: UTF-8 with lone surrogates (Python's
// surrogatepass), decimal integers, and the escapes of protocol 0.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ckptfs {

// Well-formed UTF-8, lone surrogates allowed.
bool IsUtf8(std::string_view text);

// A code point up to 0x10ffff, surrogates included.
void AppendUtf8(std::string& out, uint32_t code_point);

// Little-endian two's complement of "-12", "0", ...; nothing if it is not a
// decimal integer or has more than kMaxDecimalDigits digits.
std::optional<std::string> ParseDecimal(std::string_view text);

// Decodes the text between the quotes of a STRING operand (repr of a Python 2 str).
std::optional<std::string> UnescapeString(std::string_view text);
// A UNICODE operand (raw-unicode-escape); the result is UTF-8.
std::optional<std::string> UnescapeRawUnicode(std::string_view text);

// Each byte as the code point of its value, in UTF-8.
std::string Latin1ToUtf8(std::string_view bytes);

}  // namespace ckptfs
