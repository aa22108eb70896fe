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

enum class LogFormat {
  kText,
  kJson,  // a line: {"time", "level", "pid", "message"}, with "repeated" where it was swallowed
};
// "text" or "json".
Result<LogFormat> ParseLogFormat(std::string_view text);

// `target`: "stderr", "syslog" or the path of a file (rotated at 8 MiB, one old
// one kept; a link in its place is an error).  May be called again to change the target.
Status StartLogging(const std::string& target, LogFormat format = LogFormat::kText);

// Opens the file of the target anew: somebody has moved it away.  If that cannot be, lines go on
// to the one that was moved.
Status ReopenLog();

void Log(LogLevel level, std::string_view line);

// Hands everything written so far to the target.
void FlushLog();

}  // namespace ckptfs
