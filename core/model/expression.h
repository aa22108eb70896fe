// SPDX-License-Identifier: Apache-2.0
//
// Expression is a size in a family file: integers, variables, + - * / and
// parentheses ("heads * head_dim", "(qkv_rows - q_rows) / 2").
//
// Arithmetic is on 64-bit integers; overflow, division by zero and a division
// that leaves a remainder are errors, never a value.
//
// Thread safety: immutable.
// Lifetime: owns its text.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

class Expression {
 public:
  // Checks the syntax: at most 256 bytes, 32 parentheses deep.
  static Result<Expression> Parse(std::string_view text);

  // kNotFound if a variable is missing: see Missing.
  Result<int64_t> Evaluate(const std::map<std::string, int64_t>& variables) const;

  // Variables the expression mentions that are not in `variables`.
  std::vector<std::string> Missing(const std::map<std::string, int64_t>& variables) const;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::vector<std::string> mentioned_;
};

}  // namespace ckptfs
