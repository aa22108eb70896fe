// SPDX-License-Identifier: Apache-2.0
#include "core/model/name_template.h"

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxTemplate = 512;
constexpr size_t kMaxTokens = 64;
constexpr size_t kMaxName = 1024;

// "+3" after a hole's word.
std::optional<uint32_t> Offset(std::string_view text) {
  if (text.empty()) return 0;
  uint32_t value = 0;
  if (text.size() < 2 || text.size() > 6 || text[0] != '+' || !IsDigit(text[1])) {
    return std::nullopt;
  }
  const auto [end, error] = std::from_chars(text.data() + 1, text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

// One name being matched.  failed[token * (size + 1) + at]: known not to lead on.
struct NameTemplate::Attempt {
  std::string_view name;
  std::optional<uint32_t> layers;
  NameHoles holes;
  std::vector<bool> failed;
};

Result<NameTemplate::Token> NameTemplate::ParseHole(std::string_view hole) {
  Token token;
  auto counted = [&](std::string_view word, Kind kind) {
    if (!hole.starts_with(word)) return false;
    const auto offset = Offset(hole.substr(word.size()));
    if (!offset) return false;
    token.kind = kind;
    token.offset = *offset;
    return true;
  };
  if (counted("layers", Kind::kLayers) || counted("layer", Kind::kLayer)) return token;
  if (hole == "expert" || hole == "#" || hole == "rest") {
    token.kind = hole == "expert" ? Kind::kExpert : hole == "#" ? Kind::kNumber : Kind::kRest;
    return token;
  }
  if (hole.find('|') == std::string_view::npos) {
    return Fail(ErrorCode::kInvalid, StrCat("'{", hole, "}' is not a hole of a name template"));
  }
  token.kind = Kind::kChoice;
  while (true) {
    const size_t bar = hole.find('|');
    token.words.emplace_back(hole.substr(0, bar));
    if (bar == std::string_view::npos) return token;
    hole.remove_prefix(bar + 1);
  }
}

Result<NameTemplate> NameTemplate::Parse(std::string_view text) {
  auto refuse = [&](std::string_view rule) {
    return Fail(ErrorCode::kInvalid, StrCat("name template '", text.substr(0, 80), "': ", rule));
  };
  if (text.empty() || text.size() > kMaxTemplate) return refuse("1 to 512 bytes");
  NameTemplate parsed;
  parsed.text_ = text;
  std::string_view rest = text;
  std::vector<Kind> captured;
  while (!rest.empty()) {
    if (parsed.tokens_.size() == kMaxTokens) return refuse("more than 64 parts");
    Token token;
    size_t used = 0;
    if (rest[0] == '*') {
      used = rest.starts_with("**") ? 2 : 1;
      token.kind = used == 2 ? Kind::kAny : Kind::kSegment;
    } else if (rest[0] == '{') {
      const size_t end = rest.find('}');
      if (end == std::string_view::npos) return refuse("'{' without '}'");
      CKPT_ASSIGN_OR_RETURN(token, ParseHole(rest.substr(1, end - 1)));
      used = end + 1;
    } else {
      used = std::min(rest.find_first_of("*{"), rest.size());
      token.literal = rest.substr(0, used);
    }
    if (token.kind == Kind::kLayer || token.kind == Kind::kExpert || token.kind == Kind::kRest) {
      if (std::find(captured.begin(), captured.end(), token.kind) != captured.end()) {
        return refuse("the same hole twice");
      }
      captured.push_back(token.kind);
    }
    parsed.tokens_.push_back(std::move(token));
    rest.remove_prefix(used);
  }
  return parsed;
}

std::optional<NameHoles> NameTemplate::Match(std::string_view name,
                                             std::optional<uint32_t> layers) const {
  const Token& first = tokens_.front();
  if (first.kind == Kind::kLiteral && !name.starts_with(first.literal)) return std::nullopt;
  if (name.size() > kMaxName) return std::nullopt;
  Attempt attempt{name, layers, {}, {}};
  attempt.failed.resize(tokens_.size() * (name.size() + 1), false);
  if (!MatchFrom(attempt, 0, 0)) return std::nullopt;
  return std::move(attempt.holes);
}

bool NameTemplate::MatchFrom(Attempt& attempt, size_t token, size_t at) const {
  if (token == tokens_.size()) return at == attempt.name.size();
  const size_t memo = token * (attempt.name.size() + 1) + at;
  if (attempt.failed[memo]) return false;
  const Token& part = tokens_[token];
  const std::string_view rest = attempt.name.substr(at);
  bool matched = false;
  switch (part.kind) {
    case Kind::kLiteral:
      matched =
          rest.starts_with(part.literal) && MatchFrom(attempt, token + 1, at + part.literal.size());
      break;
    case Kind::kLayer:
    case Kind::kExpert:
    case Kind::kLayers:
    case Kind::kNumber: matched = MatchNumber(attempt, token, at); break;
    case Kind::kSegment:
    case Kind::kAny:
    case Kind::kRest: matched = MatchText(attempt, token, at); break;
    case Kind::kChoice:
      matched = std::any_of(part.words.begin(), part.words.end(), [&](const std::string& word) {
        return rest.starts_with(word) && MatchFrom(attempt, token + 1, at + word.size());
      });
      break;
  }
  if (!matched) attempt.failed[memo] = true;
  return matched;
}

// A number is all the digits that follow, without leading zeros.
bool NameTemplate::MatchNumber(Attempt& attempt, size_t token, size_t at) const {
  const Token& part = tokens_[token];
  size_t end = at;
  while (end < attempt.name.size() && IsDigit(attempt.name[end])) ++end;
  uint32_t value = 0;
  const char* text = attempt.name.data();
  if (end == at || (end - at > 1 && text[at] == '0') ||
      std::from_chars(text + at, text + end, value).ec != std::errc()) {
    return false;
  }
  if (part.kind == Kind::kLayers) {
    if (!attempt.layers || value != uint64_t{*attempt.layers} + part.offset) return false;
  } else if (part.kind == Kind::kLayer) {
    if (value < part.offset) return false;
    attempt.holes.layer = value - part.offset;
    if (attempt.layers && *attempt.holes.layer >= *attempt.layers) return false;
  } else if (part.kind == Kind::kExpert) {
    attempt.holes.expert = value;
    attempt.holes.expert_at = at;
  }
  return MatchFrom(attempt, token + 1, end);
}

bool NameTemplate::MatchText(Attempt& attempt, size_t token, size_t at) const {
  const Kind kind = tokens_[token].kind;
  size_t longest = attempt.name.size();
  if (kind == Kind::kSegment) longest = std::min(longest, attempt.name.find('.', at));
  for (size_t end = at; end <= longest; ++end) {
    if (!MatchFrom(attempt, token + 1, end)) continue;
    if (kind == Kind::kRest) attempt.holes.rest = attempt.name.substr(at, end - at);
    return true;
  }
  return false;
}

std::optional<std::string> NameTemplate::Render(const NameHoles& holes,
                                                std::optional<uint32_t> layers) const {
  std::string name;
  for (const Token& token : tokens_) {
    switch (token.kind) {
      case Kind::kLiteral: name += token.literal; break;
      case Kind::kLayer:
        if (!holes.layer) return std::nullopt;
        name += StrCat(uint64_t{*holes.layer} + token.offset);
        break;
      case Kind::kExpert:
        if (!holes.expert) return std::nullopt;
        name += StrCat(*holes.expert);
        break;
      case Kind::kLayers:
        if (!layers) return std::nullopt;
        name += StrCat(uint64_t{*layers} + token.offset);
        break;
      case Kind::kRest: name += holes.rest; break;
      case Kind::kNumber:
      case Kind::kSegment:
      case Kind::kAny:
      case Kind::kChoice: return std::nullopt;
    }
  }
  return name;
}

}  // namespace ckptfs
