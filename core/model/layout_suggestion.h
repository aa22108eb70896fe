// SPDX-License-Identifier: Apache-2.0
//
// What somebody who wrote something that is not a layout may have meant: "TP2", "tp2 dp4",
// "tp2dp4", "tp=2,zero=3", "2tp", "zreo3", "bfloat16".
//
// Thread safety: pure function.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

// The canonical text of the layout that was meant, or "" if nothing is near or several are as
// near.  Looks at no more than 256 bytes.
std::string SuggestLayout(std::string_view text);

}  // namespace ckptfs
