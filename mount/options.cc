// SPDX-License-Identifier: Apache-2.0

#include "mount/options.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "core/base/strings.h"
#include "core/store/store.h"

namespace ckptfs {
namespace {

constexpr std::string_view kUnits = "KMGTPE";

std::string HomeDirectory() {
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') return home;
  const passwd* entry = ::getpwuid(::getuid());
  return entry != nullptr && entry->pw_dir != nullptr ? entry->pw_dir : "/tmp";
}

// "s3://bucket/run" would else become a directory named "s3:".
Status RefuseUrl(std::string_view path) {
  const size_t scheme = path.find("://");
  if (scheme == std::string_view::npos || scheme == 0) return {};
  const bool letters =
      std::all_of(path.begin(), path.begin() + static_cast<ptrdiff_t>(scheme),
                  [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; });
  if (!letters) return {};
  return Fail(
      Error{ErrorCode::kUnsupported, StrCat(path, ": object stores are not read yet")}.Needing(
          "give a directory of this machine (a copy, or the bucket mounted as a "
          "filesystem)"));
}

// Options that mount(8), systemd and mount.fuse know and we do not need: the mount is
// read-only, nosuid and nodev whatever is asked.
constexpr std::array kGenericWords =
    std::to_array<std::string_view>({"rw",          "ro",
                                     "defaults",    "dev",
                                     "nodev",       "suid",
                                     "nosuid",      "exec",
                                     "noexec",      "sync",
                                     "async",       "dirsync",
                                     "atime",       "noatime",
                                     "relatime",    "norelatime",
                                     "strictatime", "nostrictatime",
                                     "diratime",    "nodiratime",
                                     "lazytime",    "nolazytime",
                                     "symfollow",   "nosymfollow",
                                     "silent",      "loud",
                                     "auto",        "noauto",
                                     "user",        "nouser",
                                     "users",       "nousers",
                                     "owner",       "noowner",
                                     "group",       "nogroup",
                                     "nofail",      "_netdev",
                                     "fsname",      "subtype",
                                     "comment",     "context",
                                     "fscontext",   "defcontext",
                                     "rootcontext", "default_permissions"});

bool IsGeneric(std::string_view name) {
  return name.starts_with("x-") || name.starts_with("X-") ||
         std::find(kGenericWords.begin(), kGenericWords.end(), name) != kGenericWords.end();
}

Status AppendOption(std::string_view option, const MountOptions& ours, bool sloppy,
                    std::vector<std::string>& out) {
  const size_t equals = option.find('=');
  std::string name(option.substr(0, equals));
  if (name == "allow_other") name = "allow-other";  // libfuse's spelling
  const auto known = ours.find(name);
  if (known == ours.end()) {
    if (sloppy || IsGeneric(name)) return {};
    return Refuse("-o ", option,
                  ": neither an option of ckptfs nor one that mount(8) has for every filesystem");
  }
  const bool has_value = equals != std::string_view::npos;
  if (known->second != has_value) {
    return Refuse("-o ", option, has_value ? ": does not take a value" : ": needs a value");
  }
  out.push_back(StrCat("--", name));
  if (has_value) out.emplace_back(option.substr(equals + 1));
  return {};
}

// True if the words of mount(8) have -s: unknown options are to be ignored then.
bool IsSloppy(const std::vector<std::string>& words) {
  return std::any_of(words.begin() + 2, words.end(), [](const std::string& word) {
    return word.starts_with('-') && word.find_first_not_of("sfnv", 1) == std::string::npos &&
           word.find('s') != std::string::npos;
  });
}

// "a,b\,c" -> a | b,c
std::vector<std::string> SplitOptions(std::string_view text) {
  std::vector<std::string> parts(1);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      parts.back() += text[++i];
    } else if (text[i] == ',') {
      parts.emplace_back();
    } else {
      parts.back() += text[i];
    }
  }
  std::erase(parts, "");
  return parts;
}

bool LooksLikeMount(const std::vector<std::string>& words) {
  return words.size() >= 3 && !words[0].empty() && words[0][0] != '-' && !words[1].empty() &&
         words[1][0] == '/' && std::find(words.begin() + 2, words.end(), "-o") != words.end();
}

}  // namespace

ExitCode ExitCodeOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNotFound: return ExitCode::kNotFound;
    case ErrorCode::kInvalid:
    case ErrorCode::kUnsupported: return ExitCode::kRefused;
    case ErrorCode::kStale: return ExitCode::kStale;
    case ErrorCode::kPermission: return ExitCode::kPermission;
    case ErrorCode::kExists: return ExitCode::kExists;
    case ErrorCode::kExhausted: return ExitCode::kExhausted;
    case ErrorCode::kDataLoss: return ExitCode::kDataLoss;
    case ErrorCode::kIo:
    case ErrorCode::kInternal: return ExitCode::kFailed;
  }
  return ExitCode::kFailed;
}

std::string DefaultStore() {
  if (const char* store = std::getenv("CKPTFS_STORE"); store != nullptr && *store != '\0') {
    return store;
  }
  if (::geteuid() == 0) return "/var/lib/ckptfs";
  if (const char* data = std::getenv("XDG_DATA_HOME"); data != nullptr && *data == '/') {
    return StrCat(std::string(data), "/ckptfs");
  }
  return StrCat(HomeDirectory(), "/.local/share/ckptfs");
}

Result<std::string> AbsolutePath(const std::string& path) {
  std::error_code error;
  CKPT_RETURN_IF_ERROR(RefuseUrl(path));
  const std::filesystem::path given = std::filesystem::absolute(path, error).lexically_normal();
  std::filesystem::path absolute = std::filesystem::weakly_canonical(given, error);
  if (error && (error.value() == ENOTCONN || error.value() == ECONNABORTED)) {
    // A mount point whose daemon is gone answers nothing, but its parent does.
    const std::filesystem::path last = given.has_filename() ? given : given.parent_path();
    absolute = std::filesystem::weakly_canonical(last.parent_path(), error) / last.filename();
  }
  if (error) return Fail(ErrnoError(error.value(), path));
  std::string text = absolute.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

std::string LinkPath(const std::string& path) {
  std::error_code error;
  std::filesystem::path given = std::filesystem::absolute(path, error).lexically_normal();
  if (!given.has_filename()) given = given.parent_path();
  return std::filesystem::is_symlink(given, error) ? given.string() : "";
}

std::string AbsoluteLog(const std::string& log) {
  if (log.empty() || log == "stderr" || log == "syslog") return log;
  return std::filesystem::absolute(log).lexically_normal().string();
}

Result<StepReference> ParseStepReference(std::string_view text) {
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos || text.find('/', slash + 1) != std::string_view::npos) {
    return Fail(ErrorCode::kInvalid,
                StrCat("'", text, "': a step is written RUN/ID, as `ckptfs list` shows it"));
  }
  const std::string_view run = text.substr(0, slash);
  const std::string_view id = text.substr(slash + 1);
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(id, "step"));
  return StepReference{std::string(run), std::string(id)};
}

Result<uint64_t> ParseBytes(std::string_view text) {
  const std::string copy(text);
  char* end = nullptr;
  const double number = std::strtod(copy.c_str(), &end);
  std::string_view unit(end);
  double factor = 1;
  if (!unit.empty()) {
    const size_t power = kUnits.find(static_cast<char>(std::toupper(unit[0])));
    if (power != std::string_view::npos) {
      for (size_t i = 0; i <= power; ++i) factor *= 1024;
      unit.remove_prefix(1);
    }
    if (unit == "iB" || unit == "B" || unit == "b") unit = "";
  }
  if (end == copy.c_str() || !unit.empty() || !(number >= 0) || number * factor >= 0x1p63) {
    return Fail(ErrorCode::kInvalid,
                StrCat("'", text, "' is not a size: write bytes, or K, M, G, T of 1024"));
  }
  return static_cast<uint64_t>(number * factor);
}

Result<uint32_t> ParseCount(std::string_view text) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number < 1u << 31) return number;
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "' is not a number from 0 to 2147483647"));
}

Result<uint32_t> ParsePositive(std::string_view text) {
  CKPT_ASSIGN_OR_RETURN(const uint32_t count, ParseCount(text));
  if (count != 0) return count;
  return Fail(ErrorCode::kInvalid, "at least 1");
}

std::string HumanBytes(uint64_t bytes) {
  if (bytes < 1024) return StrCat(bytes, " B");
  double number = static_cast<double>(bytes);
  size_t unit = 0;
  for (number /= 1024; number >= 1024 && unit + 1 < kUnits.size(); ++unit) number /= 1024;
  return fmt::format("{:.1f} {}iB", number, kUnits[unit]);
}

std::string HumanDuration(int64_t nanoseconds) {
  const int64_t seconds = std::max<int64_t>(nanoseconds / 1'000'000'000, 0);
  if (seconds < 60) return StrCat(seconds, " s");
  if (seconds < 3600) return StrCat(seconds / 60, " min");
  if (seconds < 86400) return StrCat(seconds / 3600, " h ", seconds / 60 % 60, " min");
  return StrCat(seconds / 86400, " d ", seconds / 3600 % 24, " h");
}

Result<std::vector<std::string>> TranslateMountWords(std::vector<std::string> words,
                                                     const MountOptions& ours) {
  if (!LooksLikeMount(words)) return words;
  std::vector<std::string> out = {"mount"};
  const std::string store = words[0];
  const std::string mountpoint = words[1];
  const bool sloppy = IsSloppy(words);
  for (size_t i = 2; i < words.size(); ++i) {
    const std::string& word = words[i];
    const bool takes_value = word == "-o" || word == "-t" || word == "-N";
    if (!takes_value) continue;  // -s, -f, -n, -v and their combinations
    if (++i == words.size()) return Fail(ErrorCode::kInvalid, StrCat(word, " needs a value"));
    if (word != "-o") continue;
    for (const std::string& option : SplitOptions(words[i])) {
      CKPT_RETURN_IF_ERROR(AppendOption(option, ours, sloppy, out));
    }
  }
  if (store != "none" && store != "ckptfs") {  // fstab's ways to say: the default store
    out.push_back("--store");
    out.push_back(store);
  }
  out.push_back("--");
  out.push_back(mountpoint);
  return out;
}

}  // namespace ckptfs
