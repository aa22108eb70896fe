// SPDX-License-Identifier: Apache-2.0
//
// ParseToml reads a TOML text that anybody may have written: a family (family.h) or the names of a
// dialect (core/dialect/dialect.h).  Only their parsers include this header, which brings toml++.
//
// Thread safety: pure function.
// Lifetime: the table owns what it holds; `origin` is copied.

#pragma once

#include <string_view>

#include "core/base/result.h"

#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

namespace ckptfs {

// kInvalid names the file (`origin`), the line and what is wrong there.
Result<toml::table> ParseToml(std::string_view text, std::string_view origin);

}  // namespace ckptfs
