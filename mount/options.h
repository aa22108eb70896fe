// SPDX-License-Identifier: Apache-2.0
//
// Parsers of the command line's words: exit codes, default places, steps, sizes,
// and the words mount(8) uses.
//
// Thread safety: pure functions (the environment is read).
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

// The exit codes; docs/reference/ckptfs.1.md has the same table and a test compares them.
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,    // the operating system or a defect of ours
  kUsage = 2,     // the command line
  kNotFound = 3,  // no such path, run, step or mount
  kRefused = 4,   // the input breaks a rule, or this cannot be shown
  kStale = 5,     // a source changed since it was adopted
  kPermission = 6,
  kExists = 7,     // the name is taken, or the mount is in use
  kExhausted = 8,  // no space, memory or descriptors
  kDataLoss = 9,   // bytes are missing or wrong
};
ExitCode ExitCodeOf(ErrorCode code);

// --store's default: $CKPTFS_STORE, else /var/lib/ckptfs for root, else $XDG_DATA_HOME/ckptfs or
// ~/.local/share/ckptfs.
std::string DefaultStore();

// Absolute and without symlinks as far as the path exists.  kUnsupported for a URL
// ("s3://..."): only paths of this machine are read.
Result<std::string> AbsolutePath(const std::string& path);

// The absolute path of a link, which it does not follow; "" of anything else.
std::string LinkPath(const std::string& path);

// --log's value; of a file its absolute path, in whose place a link is seen as one.
std::string AbsoluteLog(const std::string& log);

// A step on the command line: "RUN/ID" (ID may be "latest").
struct StepReference {
  std::string run;
  std::string id;
};
Result<StepReference> ParseStepReference(std::string_view text);

// "1048576", "64M", "1.5GiB", "2T": powers of 1024.
Result<uint64_t> ParseBytes(std::string_view text);

// Digits, below 2^31.
Result<uint32_t> ParseCount(std::string_view text);

// The same, not 0.
Result<uint32_t> ParsePositive(std::string_view text);

// "1.2 GiB", for people.
std::string HumanBytes(uint64_t bytes);

// "42 s", "3 min", "5 h 12 min", "2 d 3 h": the two largest units, for people.
std::string HumanDuration(int64_t nanoseconds);

// Options by name without dashes, with the values that they have: of a flag that is given "true".
using OptionValues = std::map<std::string, std::vector<std::string>, std::less<>>;

// By name without dashes: whether the option takes a value.
using MountOptions = std::map<std::string, bool, std::less<>>;

// mount(8) calls `ckptfs SPEC DIR [-sfnv] [-N ns] [-t type] [-o options]`: if
// `words` (without the program's name) look like that, the same request as words of the
// `mount` subcommand, else `words` unchanged.  Generic options are dropped, and
// unknown ones where -s says so; else those are kInvalid.  `ours`: what the subcommand takes.
Result<std::vector<std::string>> TranslateMountWords(std::vector<std::string> words,
                                                     const MountOptions& ours);

}  // namespace ckptfs
