// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/names.h"

#include <fmt/format.h>

#include "core/base/strings.h"
#include "core/base/utf8.h"

namespace ckptfs {
namespace {

constexpr size_t kKeptBytes = 200;

void AppendEscaped(std::string& out, unsigned char letter) {
  out += fmt::format("%{:02X}", letter);
}

bool NeedsEscape(unsigned char letter) {
  return letter == '/' || letter == '%' || letter < 0x20 || letter == 0x7f;
}

// The longest prefix of at most `limit` bytes that ends neither inside an
// escape nor inside a UTF-8 sequence.
std::string_view CutAtBorder(std::string_view escaped, size_t limit) {
  size_t end = CutUtf8(escaped, limit).size();
  if (end >= 1 && escaped[end - 1] == '%')
    end -= 1;
  else if (end >= 2 && escaped[end - 2] == '%')
    end -= 2;
  return escaped.substr(0, end);
}

}  // namespace

std::string EscapeComponent(std::string_view name) {
  if (name.empty()) return "%";
  if (name == ".") return "%2E";
  if (name == "..") return "%2E%2E";
  std::string escaped;
  escaped.reserve(name.size());
  for (const char letter : name) {
    if (NeedsEscape(static_cast<unsigned char>(letter))) {
      AppendEscaped(escaped, static_cast<unsigned char>(letter));
    } else {
      escaped += letter;
    }
  }
  if (escaped.size() <= kMaxComponent) return escaped;
  return fmt::format("{}~{:016x}", CutAtBorder(escaped, kKeptBytes), HashOf(name));
}

uint64_t InodeSeed(const Digest& manifest) { return HashOf(manifest.Hex()); }

InodeNumber InodeOf(uint64_t seed, std::string_view path, uint64_t attempt) {
  for (uint64_t extra = 0;; ++extra) {
    const uint64_t salt = (attempt + extra * 0x10001) * 0x9e3779b97f4a7c15ull;
    const uint64_t number = HashOf(path, seed ^ salt);
    if (number > static_cast<uint64_t>(kRootInode)) return InodeNumber{number};
  }
}

uint64_t CookieOf(std::string_view name) {
  constexpr uint64_t kFirst = 16;  // "." and ".." have smaller ones
  const uint64_t cookie = HashOf(name) >> 1;
  return cookie < kFirst ? cookie + kFirst : cookie;
}

}  // namespace ckptfs
