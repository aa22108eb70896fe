// SPDX-License-Identifier: Apache-2.0

#include "core/model/toml_file.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// toml++ 3 takes for granted that a key follows the brackets of a table's
// header ("[[[" is undefined behaviour in a release): checked before it looks.
Status CheckHeaders(std::string_view text, std::string_view origin) {
  constexpr std::string_view kSpace = " \t";
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  for (size_t line = 1; !text.empty();) {
    const size_t end = std::min(text.find_first_of("\n\v\f\r"), text.size());
    std::string_view rest = text.substr(0, end);
    const size_t here = line;
    line += end < text.size() && text[end] == '\n' ? 1 : 0;
    text.remove_prefix(std::min(end + 1, text.size()));
    auto skip_space = [&] {
      while (!rest.empty() && kSpace.find(rest[0]) != std::string_view::npos) rest.remove_prefix(1);
    };
    skip_space();
    if (!rest.starts_with('[')) continue;
    rest.remove_prefix(rest.starts_with("[[") ? 2 : 1);
    skip_space();
    const char next = rest.empty() ? '\0' : rest[0];
    const bool key = (next >= '0' && next <= '9') || (next >= 'a' && next <= 'z') ||
                     (next >= 'A' && next <= 'Z') || next == '_' || next == '-' || next == '"' ||
                     next == '\'';
    if (!key) {
      return Fail(ErrorCode::kInvalid, StrCat(origin, ":", here, ": a name follows '['"));
    }
  }
  return {};
}

}  // namespace

Result<toml::table> ParseToml(std::string_view text, std::string_view origin) {
  CKPT_RETURN_IF_ERROR(CheckHeaders(text, origin));
  toml::parse_result file = toml::parse(text, origin);
  if (!file) {
    return Fail(ErrorCode::kInvalid, StrCat(origin, ":", file.error().source().begin.line, ": ",
                                            file.error().description()));
  }
  return std::move(file).table();
}

}  // namespace ckptfs
