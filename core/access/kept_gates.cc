// SPDX-License-Identifier: Apache-2.0

#include "core/access/kept_gates.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"
#include "core/base/trust.h"

namespace ckptfs {
namespace {

constexpr std::string_view kBlobs = "/blobs/";
constexpr size_t kDigestDigits = 32;
constexpr size_t kMaxBytes = 4 << 20;

// "<store>/blobs/<digest>"; the first one, since what follows was named by others.
std::optional<std::string> CopyOf(const std::string& root) {
  constexpr std::string_view kHex = "0123456789abcdef";
  for (size_t at = root.find(kBlobs); at != root.npos; at = root.find(kBlobs, at + 1)) {
    const size_t begin = at + kBlobs.size();
    const size_t end = std::min(root.find('/', begin), root.size());
    const std::string_view digest = std::string_view(root).substr(begin, end - begin);
    if (digest.size() == kDigestDigits && digest.find_first_not_of(kHex) == digest.npos) {
      return root.substr(0, end);
    }
  }
  return std::nullopt;
}

std::optional<std::string> ReadOurs(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status;
  if (!file.valid() || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (!WhyNotTrusted(status, Believed::kOwnUserOrRoot).empty()) return {};
  if (static_cast<size_t>(status.st_size) > kMaxBytes) return {};
  std::string text(static_cast<size_t>(status.st_size), '\0');
  if (pread(file.get(), text.data(), text.size(), 0) != status.st_size) return {};
  return text;
}

// A number and the character after it.
bool TakeNumber(std::string_view& text, int base, char after, uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  const size_t length = static_cast<size_t>(end - text.data());
  if (error != std::errc() || length >= text.size() || text[length] != after) return false;
  text.remove_prefix(length + 1);
  return true;
}

std::string Octal(uint32_t mode) {
  char digits[12];
  const auto end = std::to_chars(digits, digits + sizeof(digits), mode, 8).ptr;
  return std::string(digits, end);
}

}  // namespace

std::string RenderKeptGates(const std::vector<OwnerAndMode>& gates) {
  std::string text;
  for (const OwnerAndMode& gate : gates) {
    text += StrCat(Octal(gate.mode), " ", gate.uid, " ", gate.gid, " ", gate.acl ? 1 : 0, "\n");
  }
  return text;
}

std::optional<std::vector<OwnerAndMode>> ReadKeptGates(const std::string& root) {
  const auto copy = CopyOf(root);
  const auto text = copy ? ReadOurs(StrCat(*copy, "/", kKeptGatesName)) : std::nullopt;
  if (!text || text->empty()) return std::nullopt;  // "/" is above everything
  std::vector<OwnerAndMode> gates;
  for (std::string_view left = *text; !left.empty();) {
    OwnerAndMode gate;
    uint32_t acl = 0;
    if (!TakeNumber(left, 8, ' ', gate.mode) || !TakeNumber(left, 10, ' ', gate.uid) ||
        !TakeNumber(left, 10, ' ', gate.gid) || !TakeNumber(left, 10, '\n', acl)) {
      return std::nullopt;
    }
    gate.acl = acl != 0;
    gates.push_back(gate);
  }
  return gates;
}

}  // namespace ckptfs
