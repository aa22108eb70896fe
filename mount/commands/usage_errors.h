// SPDX-License-Identifier: Apache-2.0
//
// These functions say what is wrong with the words of a command line, and what was probably meant.
//
// Thread safety: pure functions.

#pragma once

#include <deque>
#include <set>
#include <string>
#include <vector>

#include "mount/commands/command.h"

namespace ckptfs {

// There is no such command.
std::string WhyNoCommand(const std::deque<Command>& commands, const std::string& word);
// The line begins with an option: the program itself has only two.
std::string WhyNotInFront(const std::deque<Command>& commands,
                          const std::vector<std::string>& words);
// The command does not have this argument.
std::string WhyExtra(const Command& command, const std::string& extra);
// The first of its arguments that is needed and is not among the `given`; empty if none is.
std::string WhyMissing(const Command& command, const std::set<std::string>& given);

// The first word that looks like an option of the command and is not one: found before the words
// are taken apart, since what stands behind it would be taken for something else.
std::string UnknownOption(const Command& command, const std::vector<std::string>& words);

}  // namespace ckptfs
