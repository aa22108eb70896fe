// SPDX-License-Identifier: Apache-2.0
//
// SuggestLayout guesses the layout that a user meant by a text that is not one: "TP2", "tp2 dp4",
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
