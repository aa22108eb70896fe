// SPDX-License-Identifier: Apache-2.0

#include "formats/sharding/name_pattern.h"

#include <re2/re2.h>

#include <cctype>
#include <optional>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxText = 4096;
constexpr std::string_view kClasses = "dDwWsS";

// Spells in RE2's language what Python's says.  Structure is handed on, for RE2
// to check; whatever stands for itself is written so that it can mean nothing else.
class Translator {
 public:
  explicit Translator(std::string_view text) : text_(text) {}

  Result<std::string> Translate() && {
    while (More()) CKPT_RETURN_IF_ERROR(Next());
    return std::move(out_);
  }

 private:
  bool More() const { return at_ < text_.size(); }
  bool Eat(char letter) {
    if (!More() || text_[at_] != letter) return false;
    ++at_;
    return true;
  }

  void Literal(char letter) {
    constexpr std::string_view kHex = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(letter);
    if (std::isalnum(byte) != 0) {
      out_ += letter;
    } else {
      out_ += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }

  Status Next() {
    const bool repeatable = std::exchange(repeatable_, true);
    const char letter = text_[at_++];
    switch (letter) {
      case '|':
      case '^':
      case '$':
        repeatable_ = false;
        out_ += letter;
        return {};
      case '.':
      case ')': out_ += letter; return {};
      case '(': return Group();
      case '[': return Class();
      case '\\': return Escape();
      case '*':
      case '+':
      case '?':
      case '{': return Repetition(letter, repeatable);
      default: Literal(letter); return {};
    }
  }

  Status Group() {
    repeatable_ = false;
    if (!Eat('?')) {
      out_ += '(';
      return {};
    }
    if (!Eat(':')) return Fail(ErrorCode::kUnsupported, "a group (?...) other than (?:...)");
    out_ += "(?:";
    return {};
  }

  Status Escape() {
    if (!More()) return Fail(ErrorCode::kInvalid, "ends in a backslash");
    const char letter = text_[at_++];
    if (kClasses.find(letter) != std::string_view::npos) {
      out_ += {'\\', letter};
    } else if (letter == 'A' || letter == 'Z') {
      out_ += letter == 'A' ? "\\A" : "\\z";
      repeatable_ = false;
    } else if (std::isalnum(static_cast<unsigned char>(letter)) != 0) {
      return Fail(ErrorCode::kUnsupported, StrCat("the escape \\", letter));
    } else {
      Literal(letter);
    }
    return {};
  }

  // {m}, {m,}, {,n}, {m,n}; any other '{' stands for itself.
  bool Counts(std::string& out) {
    const size_t before = at_;
    const auto number = [&] {
      const size_t begin = at_;
      while (More() && IsDigit(text_[at_])) ++at_;
      return text_.substr(begin, at_ - begin);
    };
    std::string least(number());
    const bool any = !least.empty();
    if (!any) least = "0";
    const bool comma = Eat(',');
    out = StrCat("{", least, comma ? "," : "", comma ? number() : "", "}");
    if ((any || comma) && Eat('}')) return true;
    at_ = before;
    return false;
  }

  Status Repetition(char letter, bool repeatable) {
    std::string counts(1, letter);
    if (letter == '{' && !Counts(counts)) {
      Literal('{');
      return {};
    }
    if (!repeatable) return Fail(ErrorCode::kInvalid, "a repetition of nothing or of a repetition");
    out_ += counts;
    if (Eat('+')) return Fail(ErrorCode::kUnsupported, "a possessive repetition");
    (void)Eat('?');  // lazy: the same names match
    repeatable_ = false;
    return {};
  }

  // One byte of a class, or nothing for \d and its like, which are printed.
  Result<std::optional<char>> Member() {
    if (!More()) return Fail(ErrorCode::kInvalid, "a '[' without its ']'");
    const char letter = text_[at_++];
    if (letter == '[') return Fail(ErrorCode::kUnsupported, "a '[' within [...]");
    if (letter != '\\') return letter;
    if (!More()) return Fail(ErrorCode::kInvalid, "ends in a backslash");
    const char escaped = text_[at_++];
    if (kClasses.find(escaped) != std::string_view::npos) {
      out_ += {'\\', escaped};
      return std::nullopt;
    }
    if (std::isalnum(static_cast<unsigned char>(escaped)) != 0) {
      return Fail(ErrorCode::kUnsupported, StrCat("the escape \\", escaped));
    }
    return escaped;
  }

  Status Class() {
    out_ += '[';
    if (Eat('^')) out_ += '^';
    for (bool first = true; first || !Eat(']'); first = false) {
      CKPT_ASSIGN_OR_RETURN(const std::optional<char> from, Member());
      const bool range = at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']';
      if (from) Literal(*from);
      if (!range) continue;
      ++at_;
      const size_t printed = out_.size();
      CKPT_ASSIGN_OR_RETURN(const std::optional<char> to, Member());
      if (!from || !to || static_cast<unsigned char>(*to) < static_cast<unsigned char>(*from)) {
        return Fail(ErrorCode::kInvalid, "a class whose range runs backwards or is not one");
      }
      out_.insert(printed, "-");
      Literal(*to);
    }
    out_ += ']';
    return {};
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string out_;
  bool repeatable_ = false;  // a repetition may follow
};

Result<std::shared_ptr<const RE2>> Compile(std::string_view text) {
  if (text.size() > kMaxText) return Fail(ErrorCode::kInvalid, "longer than 4096 characters");
  CKPT_ASSIGN_OR_RETURN(const std::string spelled, Translator(text).Translate());
  RE2::Options options(RE2::Latin1);
  options.set_log_errors(false);
  options.set_never_capture(true);
  auto matcher = std::make_shared<const RE2>(spelled, options);
  if (!matcher->ok()) return Fail(ErrorCode::kInvalid, matcher->error());
  return matcher;
}

}  // namespace

Result<NamePattern> NamePattern::Parse(std::string_view text) {
  auto matcher = Compile(text);
  if (!matcher) {
    return Fail(
        std::move(matcher).error().WithContext(StrCat("pattern '", text.substr(0, 200), "'")));
  }
  NamePattern out;
  out.text_ = text;
  out.matcher_ = *std::move(matcher);
  return out;
}

bool NamePattern::MatchesPrefix(std::string_view name) const {
  return matcher_->Match({name.data(), name.size()}, 0, name.size(), RE2::ANCHOR_START, nullptr, 0);
}

bool NamePattern::MatchesWhole(std::string_view name) const {
  return matcher_->Match({name.data(), name.size()}, 0, name.size(), RE2::ANCHOR_BOTH, nullptr, 0);
}

}  // namespace ckptfs
