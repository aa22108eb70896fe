// SPDX-License-Identifier: Apache-2.0
//
// Words of a command line as somebody types them into a shell.
//
// Thread safety: pure functions.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

// In single quotes of a POSIX shell.
std::string SingleQuoted(std::string_view text);

// The word as it is where that is safe, else in quotes; what Printable would change is written
// as $'\xNN', which bash, zsh and ksh read, so that the text can be shown and copied.
std::string ShellWord(std::string_view word);

}  // namespace ckptfs
