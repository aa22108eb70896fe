// SPDX-License-Identifier: Apache-2.0
//
// NamePattern is a Python regular expression over parameter names, matched by
// RE2 in time linear in the name: patterns come out of checkpoints, and a
// backtracking matcher would let one hang or overflow the stack.
//
//   literals, . [...] [^...] \d \D \w \W \s \S \A \Z, escaped punctuation,
//   (...) (?:...) | * + ? {m} {m,} {,n} {m,n} (lazy forms too), ^ $
//
// Anything else is refused by name: look-around, back references and flags, and
// what the two languages read differently (POSIX classes, \Q, possessive forms).
// `$` is the name's very end; Python's would pass over a newline there.
//
// Thread safety: immutable once made.
// Units: bytes; '.' and classes match single bytes.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/base/result.h"

namespace re2 {
class RE2;
}

namespace ckptfs {

class NamePattern {
 public:
  // kUnsupported names what is not understood, kInvalid what is malformed.
  static Result<NamePattern> Parse(std::string_view text);

  // Python's re.match (from the start, anywhere to) and re.fullmatch.
  bool MatchesPrefix(std::string_view name) const;
  bool MatchesWhole(std::string_view name) const;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::shared_ptr<const re2::RE2> matcher_;
};

}  // namespace ckptfs
