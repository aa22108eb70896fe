// SPDX-License-Identifier: Apache-2.0
//
// A configuration file holds the options of one mount or one daemon, as the command line does:
//
//   file   = TOML with one table, [mount] or [daemon]
//   key    = an option's name without its dashes, or one that only a file has
//   (Command::file_options) value  = true (a flag; false: it is not given) | text or a whole number
//   | a list of these
//
// A file does not change what the command line says.  Paths are absolute: a file has no working
// directory.  It is untrusted text of at most kConfigBytes, and believed only if nobody but its
// owner, who is root or this user, may write it.
//
// Thread safety: used by the process's first thread, and by one that reads a file again.

#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "mount/commands/command.h"

namespace ckptfs {

inline constexpr size_t kConfigBytes = 1 << 20;
inline constexpr const char* kConfigDirectory = "/etc/ckptfs";

// --config's value as a path: a word without a slash is a file of kConfigDirectory, ".toml" may be
// left out.
Result<std::string> ConfigPath(const std::string& text);

// The file's text.  kPermission if others may write it.
Result<std::string> ReadConfigText(const std::string& path);

// Sets the options of `command` that `given` does not name, and notes them as
// Command::from_file.  Returns what is wrong, each as "FILE:LINE: rule"; then nothing was set.
std::vector<std::string> ApplyConfig(std::string_view text, const std::string& path,
                                     const std::set<std::string>& given, Command& command);

// The command that the file is for: "mount" or "daemon"; kInvalid for what has neither or both.
Result<std::string> CommandOfConfig(std::string_view text, const std::string& path);

}  // namespace ckptfs
