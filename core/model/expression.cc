// SPDX-License-Identifier: Apache-2.0
#include "core/model/expression.h"

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxExpressionText = 256;
constexpr int kMaxDepth = 32;

using Variables = std::map<std::string, int64_t>;

bool IsWord(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Recursive descent; the depth is bounded by kMaxDepth parentheses.
//   sum = product *( ("+"|"-") product ); product = atom *( ("*"|"/") atom )
//   atom = number | word | "(" sum ")"
class Evaluator {
 public:
  // Without variables every word counts as 1 and is collected.
  Evaluator(std::string_view text, const Variables* variables)
      : text_(text), rest_(text), variables_(variables) {}

  Result<int64_t> All() {
    CKPT_ASSIGN_OR_RETURN(const int64_t value, Sum(0));
    if (Peek() != '\0') return Refuse(StrCat("'", rest_, "' is left over"));
    return value;
  }
  std::vector<std::string> mentioned;

 private:
  tl::unexpected<Error> Refuse(std::string_view rule, ErrorCode code = ErrorCode::kInvalid) const {
    return Fail(code, StrCat("expression '", text_, "': ", rule));
  }

  char Peek() {
    while (!rest_.empty() && rest_[0] == ' ') rest_.remove_prefix(1);
    return rest_.empty() ? '\0' : rest_[0];
  }

  Result<int64_t> Sum(int depth) {
    CKPT_ASSIGN_OR_RETURN(int64_t value, Product(depth));
    while (Peek() == '+' || Peek() == '-') {
      const bool plus = rest_[0] == '+';
      rest_.remove_prefix(1);
      CKPT_ASSIGN_OR_RETURN(const int64_t other, Product(depth));
      if (plus ? __builtin_add_overflow(value, other, &value)
               : __builtin_sub_overflow(value, other, &value)) {
        return Refuse("too large");
      }
    }
    return value;
  }

  Result<int64_t> Product(int depth) {
    CKPT_ASSIGN_OR_RETURN(int64_t value, Atom(depth));
    while (Peek() == '*' || Peek() == '/') {
      const bool times = rest_[0] == '*';
      rest_.remove_prefix(1);
      CKPT_ASSIGN_OR_RETURN(const int64_t other, Atom(depth));
      if (times) {
        if (__builtin_mul_overflow(value, other, &value)) return Refuse("too large");
      } else {
        if (variables_ == nullptr) continue;
        if (other <= 0 || value % other != 0) {
          return Refuse(StrCat(value, " does not divide by ", other));
        }
        value /= other;
      }
    }
    return value;
  }

  Result<int64_t> Atom(int depth) {
    const char next = Peek();
    if (next == '(') {
      if (depth == kMaxDepth) return Refuse("more than 32 parentheses deep");
      rest_.remove_prefix(1);
      CKPT_ASSIGN_OR_RETURN(const int64_t value, Sum(depth + 1));
      if (Peek() != ')') return Refuse("a ')' is missing");
      rest_.remove_prefix(1);
      return value;
    }
    size_t size = 0;
    while (size < rest_.size() && IsWord(rest_[size])) ++size;
    const std::string word(rest_.substr(0, size));
    rest_.remove_prefix(size);
    if (word.empty()) return Refuse("a number, a variable or '(' is missing");
    if (next >= '0' && next <= '9') {
      int64_t value = 0;
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (error != std::errc() || end != word.data() + word.size()) {
        return Refuse(StrCat("'", word, "' is not a number"));
      }
      return value;
    }
    mentioned.push_back(word);
    if (variables_ == nullptr) return 1;
    const auto found = variables_->find(word);
    if (found == variables_->end()) {
      return Refuse(StrCat("'", word, "' is not known"), ErrorCode::kNotFound);
    }
    return found->second;
  }

  std::string_view text_;
  std::string_view rest_;
  const Variables* variables_;
};

}  // namespace

Result<Expression> Expression::Parse(std::string_view text) {
  if (text.size() > kMaxExpressionText)
    return Fail(ErrorCode::kInvalid, "expression: longer than 256 bytes");
  Evaluator evaluator(text, nullptr);
  CKPT_RETURN_IF_ERROR(evaluator.All());
  Expression expression;
  expression.text_ = text;
  expression.mentioned_ = std::move(evaluator.mentioned);
  return expression;
}

Result<int64_t> Expression::Evaluate(const Variables& variables) const {
  return Evaluator(text_, &variables).All();
}

std::vector<std::string> Expression::Missing(const Variables& variables) const {
  std::vector<std::string> missing;
  for (const std::string& word : mentioned_) {
    if (!variables.contains(word) &&
        std::find(missing.begin(), missing.end(), word) == missing.end()) {
      missing.push_back(word);
    }
  }
  return missing;
}

}  // namespace ckptfs
