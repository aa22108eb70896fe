// SPDX-License-Identifier: Apache-2.0
//
// tl::expected, of which none may be dropped unread: an alias (Result) cannot say so, but the first
// declaration of a class can.  Nobody else includes <tl/expected.hpp>.
//
// Thread safety: as safe as what it holds.

#pragma once

namespace tl {
template <class T, class E>
class [[nodiscard]] expected;
}  // namespace tl

#include <tl/expected.hpp>
