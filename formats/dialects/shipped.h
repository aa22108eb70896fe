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

// REQUIRES: a dialect that has a table: kHf5, kMcore, kTitan.
Result<DialectTable> ShippedDialect(Dialect dialect);

// hf5.toml, mcore.toml and titan.toml; their sources are generated.
std::string_view Hf5DialectText();
std::string_view McoreDialectText();
std::string_view TitanDialectText();

}  // namespace ckptfs
