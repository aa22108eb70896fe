// SPDX-License-Identifier: Apache-2.0
//
// Printable makes text that somebody else chose (names of a checkpoint, paths,
// errors that hold them) safe for a terminal and a log: it neither moves the
// cursor nor forges a line.  Everything the commands print goes through it, but
// for JSON, which has escapes of its own.
//
// Thread safety: pure function.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

// `text` with control characters (C0, DEL, C1), characters that turn or hide what
// stands beside them, and bytes that are not UTF-8 as \xNN of each byte.
std::string Printable(std::string_view text);

}  // namespace ckptfs
