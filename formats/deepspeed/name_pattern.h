// SPDX-License-Identifier: Apache-2.0
//
// NamePattern is a Python regular expression over parameter names, matched in
// time linear in the name: patterns come out of checkpoints, and a backtracking
// matcher would let one hang or overflow the stack.
//
//   literals, . [...] [^...] \d \D \w \W \s \S, escaped punctuation,
//   (...) (?:...) | * + ? {m} {m,} {m,n} (lazy forms too), ^ $
//
// Anything else (look-around, back references, flags) is refused by name.
//
// Thread safety: immutable once made.
// Units: bytes; '.' and classes match single bytes.

#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs::deepspeed {

class NamePattern {
 public:
  // kUnsupported names what is not understood, kInvalid what is malformed.
  static Result<NamePattern> Parse(std::string_view text);

  // Python's re.match (from the start, anywhere to) and re.fullmatch.
  bool MatchesPrefix(std::string_view name) const { return Run(name, false); }
  bool MatchesWhole(std::string_view name) const { return Run(name, true); }

  const std::string& text() const { return text_; }

  struct Instruction {
    enum class Kind : uint8_t { kSet, kSplit, kJump, kBegin, kEnd, kMatch } kind;
    uint32_t a = 0;  // kSet: index of the set; kSplit, kJump: target
    uint32_t b = 0;  // kSplit: second target
  };

 private:
  bool Run(std::string_view name, bool whole) const;
  void Follow(uint32_t at, size_t position, size_t length, std::vector<uint32_t>& threads,
              std::vector<size_t>& seen) const;

  std::string text_;
  std::vector<Instruction> program_;
  std::vector<std::bitset<256>> sets_;
};

}  // namespace ckptfs::deepspeed
