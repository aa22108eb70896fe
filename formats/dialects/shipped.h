// SPDX-License-Identifier: Apache-2.0
//
// The tables of names of this folder, compiled in.
//
// Thread safety: pure functions.

#pragma once

#include <string_view>

#include "core/base/result.h"
#include "core/dialect/dialect.h"
#include "core/model/layout.h"

namespace ckptfs {

// REQUIRES: a dialect that has a table: kHf5, kMcore.
Result<DialectTable> ShippedDialect(Dialect dialect);

// hf5.toml and mcore.toml; their sources are generated.
std::string_view Hf5DialectText();
std::string_view McoreDialectText();

}  // namespace ckptfs
