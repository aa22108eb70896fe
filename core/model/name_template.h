// SPDX-License-Identifier: Apache-2.0
//
// NameTemplate is how family files spell classes of parameter names:
//
//   template = 1*( literal | "*" | "**" | "{" hole "}" )
//   hole     = "layer" [offset] | "expert"       a number, captured
//            | "layers" [offset]                 the number of layers (known, or no match)
//            | "#"                               any number
//            | "rest"                            any text, captured
//            | word 1*( "|" word )               one of the words ("weight|bias")
//   offset   = "+" 1*DIGIT
//
// "*" is any text without a '.', "**" any text.  A template matches whole names
// only.  "model.layers.{layer}.*.{weight|bias}"; in the pipeline's spelling
// "{layer+1}.*": layer 0 is then written 1.
//
// Not regular expressions: matching takes time in proportion to template times
// name and no stack in proportion to the name, whoever wrote either.
//
// Thread safety: immutable.
// Lifetime: owns its text.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

// The values of a template's holes in one name.
struct NameHoles {
  std::optional<uint32_t> layer;
  std::optional<uint32_t> expert;
  size_t expert_at = 0;  // where it stands in the name, in bytes
  std::string rest;
};

class NameTemplate {
 public:
  static Result<NameTemplate> Parse(std::string_view text);

  // `layers`: how many there are, if known; a greater layer does not match.
  std::optional<NameHoles> Match(std::string_view name, std::optional<uint32_t> layers) const;

  // The name with the holes filled; nothing if one of them is not known or the
  // template holds "*", "{#}" or a choice.
  std::optional<std::string> Render(const NameHoles& holes, std::optional<uint32_t> layers) const;

  const std::string& text() const { return text_; }

 private:
  enum class Kind { kLiteral, kLayer, kExpert, kLayers, kNumber, kSegment, kAny, kRest, kChoice };
  struct Token {
    Kind kind = Kind::kLiteral;
    std::string literal;
    uint32_t offset = 0;
    std::vector<std::string> words;
  };
  struct Attempt;

  static Result<Token> ParseHole(std::string_view hole);
  bool MatchFrom(Attempt& attempt, size_t token, size_t at) const;
  bool MatchNumber(Attempt& attempt, size_t token, size_t at) const;
  bool MatchText(Attempt& attempt, size_t token, size_t at) const;

  std::string text_;
  std::vector<Token> tokens_;
};

}  // namespace ckptfs
