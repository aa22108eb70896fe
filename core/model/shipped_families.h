// SPDX-License-Identifier: Apache-2.0
//
// The texts of formats/families/*.toml, compiled in; the .cc is generated.
//
// Thread safety: pure function.
// Lifetime: static.

#pragma once

#include <span>
#include <string_view>
#include <utility>

namespace ckptfs {

// (file name, text), in the order in which families are tried.
std::span<const std::pair<std::string_view, std::string_view>> ShippedFamilies();

}  // namespace ckptfs
