// SPDX-License-Identifier: Apache-2.0
//
// The families of this folder, compiled in.  CMakeLists.txt lists them in the
// order in which they are tried; the source of their texts is generated.
//
// Thread safety: pure functions.

#pragma once

#include <span>
#include <string_view>
#include <utility>

#include "core/base/result.h"
#include "core/model/family.h"

namespace ckptfs {

Result<FamilySet> ShippedFamilies();

// (file name, text).
std::span<const std::pair<std::string_view, std::string_view>> ShippedFamilyTexts();

}  // namespace ckptfs
