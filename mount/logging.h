// SPDX-License-Identifier: Apache-2.0
//
// The process's log.  Lower layers return errors or call FilesystemOptions::log;
// only mount/ writes lines.  The same line is written at most once a minute.
//
// Thread safety: all functions may be called concurrently; a line goes to the target of
// before or after a change.

#pragma once

#include <string>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

enum class LogLevel { kInfo, kWarning, kError };

// `target`: "stderr", "syslog" or the path of a file (rotated at 8 MiB, one old
// one kept; a link in its place is an error).  May be called again to change the target.
Status StartLogging(const std::string& target);

void Log(LogLevel level, std::string_view line);

// Hands everything written so far to the target.
void FlushLog();

}  // namespace ckptfs
