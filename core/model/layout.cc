// SPDX-License-Identifier: Apache-2.0
#include "core/model/layout.h"

#include <array>
#include <charconv>

#include "core/base/strings.h"
#include "core/model/layout_suggestion.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxWorld = uint64_t{1} << 20;
constexpr size_t kMaxLayoutText = 4096;
constexpr size_t kMaxStages = 4096;

struct DegreeToken {
  std::string_view name;
  uint32_t Layout::*field;
};
// Canonical order.
constexpr std::array<DegreeToken, 7> kDegrees = {{
    {"tp", &Layout::tp},
    {"pp", &Layout::pp},
    {"dp", &Layout::dp},
    {"ep", &Layout::ep},
    {"etp", &Layout::etp},
    {"cp", &Layout::cp},
    {"vpp", &Layout::vpp},
}};

struct DtypeToken {
  std::string_view name;
  DType dtype;
};
constexpr std::array<DtypeToken, 3> kDtypes = {{
    {"bf16", DType::kBF16},
    {"fp16", DType::kF16},
    {"fp32", DType::kF32},
}};

struct DialectWord {
  std::string_view name;
  Dialect dialect;
};
constexpr std::array<DialectWord, 4> kDialects = {{
    {"hf", Dialect::kHf},
    {"hf5", Dialect::kHf5},
    {"mcore", Dialect::kMcore},
    {"torchtitan", Dialect::kTitan},
}};

struct KeysToken {
  std::string_view name;
  StateKeys keys;
};
constexpr std::array<KeysToken, 5> kKeys = {{
    {"nested", StateKeys::kNested},
    {"flat", StateKeys::kFlat},
    {"titan", StateKeys::kTitan},
    {"accelerate", StateKeys::kAccelerate},
    {"numbered", StateKeys::kNumbered},
}};

// All of `text` as a number of at most `maximum`.
std::optional<uint32_t> Number(std::string_view text, uint64_t maximum) {
  if (text.empty() || !IsDigit(text.front())) return std::nullopt;
  uint64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > maximum) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(value);
}

class Parser {
 public:
  Status Token(std::string_view token) {
    for (const DtypeToken& candidate : kDtypes) {
      if (token == candidate.name) {
        CKPT_RETURN_IF_ERROR(Once("a dtype", token));
        layout_.dtype = candidate.dtype;
        return {};
      }
    }
    if (token == "plain" || token == "pipe") {
      CKPT_RETURN_IF_ERROR(Once("a naming", token));
      layout_.naming = token == "pipe" ? Naming::kPipe : Naming::kPlain;
      return {};
    }
    for (const DialectWord& candidate : kDialects) {
      if (token == candidate.name) {
        CKPT_RETURN_IF_ERROR(Once("a dialect", token));
        layout_.dialect = candidate.dialect;
        return {};
      }
    }
    for (const KeysToken& candidate : kKeys) {
      if (token == candidate.name) {
        CKPT_RETURN_IF_ERROR(Once("a key shape", token));
        layout_.keys = candidate.keys;
        return {};
      }
    }
    size_t letters = 0;
    while (letters < token.size() && !IsDigit(token[letters])) ++letters;
    const std::string_view word = token.substr(0, letters);
    const std::string_view number = token.substr(letters);
    if (word == "zero") return Zero(token, number);
    if (word == "split") return Split(token, number);
    for (const DegreeToken& degree : kDegrees) {
      if (word == degree.name) return Degree(degree, token, number);
    }
    return Refuse(
        token,
        "unknown; known are tp2 pp2 dp2 ep2 etp2 cp2 vpp2 zero1 bf16 fp16 fp32 "
        "split3-5 plain pipe hf hf5 mcore torchtitan nested flat titan accelerate numbered");
  }

  Result<Layout> Finish() {
    uint64_t world = 1;
    for (uint32_t degree : {layout_.tp, layout_.cp, layout_.dp, layout_.pp}) {
      world *= degree;  // each at most 2^20
      if (world > kMaxWorld) {
        return Fail(ErrorCode::kInvalid, "layout: more than 1048576 ranks");
      }
    }
    const uint64_t stage_ranks = world / layout_.pp;
    if (stage_ranks % (uint64_t{layout_.ep} * layout_.etp) != 0) {
      return Fail(ErrorCode::kInvalid,
                  StrCat("layout: ep", layout_.ep, " times etp", layout_.etp,
                         " does not divide the ", stage_ranks, " ranks of a stage (tp*cp*dp)"));
    }
    const uint64_t chunks = uint64_t{layout_.pp} * layout_.vpp;
    if (chunks > kMaxWorld) return Fail(ErrorCode::kInvalid, "layout: pp*vpp above 1048576");
    if (!layout_.split.empty() && layout_.split.size() != chunks) {
      return Fail(ErrorCode::kInvalid, StrCat("layout: split lists ", layout_.split.size(),
                                              " stages, but pp*vpp is ", chunks));
    }
    return layout_;
  }

 private:
  static Status Refuse(std::string_view token, std::string_view rule) {
    return Fail(ErrorCode::kInvalid, StrCat("layout token '", token.substr(0, 64), "': ", rule));
  }

  Status Once(std::string_view what, std::string_view token) {
    for (const std::string& other : seen_) {
      if (other == what) return Refuse(token, StrCat(what, " is given twice"));
    }
    seen_.emplace_back(what);
    return {};
  }

  Status Zero(std::string_view token, std::string_view number) {
    CKPT_RETURN_IF_ERROR(Once("zero", token));
    const auto stage = Number(number, 3);
    if (!stage) return Refuse(token, "zero must be followed by 0, 1, 2 or 3");
    layout_.zero = *stage;
    return {};
  }

  Status Degree(const DegreeToken& degree, std::string_view token, std::string_view number) {
    CKPT_RETURN_IF_ERROR(Once(degree.name, token));
    const auto value = Number(number, kMaxWorld);
    if (!value || *value == 0) {
      return Refuse(token, StrCat("'", degree.name,
                                  "' must be followed by a whole number from 1 "
                                  "to 1048576"));
    }
    layout_.*degree.field = *value;
    return {};
  }

  Status Split(std::string_view token, std::string_view numbers) {
    CKPT_RETURN_IF_ERROR(Once("split", token));
    uint64_t layers = 0;
    while (true) {
      const size_t dash = numbers.find('-');
      const auto value = Number(numbers.substr(0, dash), kMaxWorld);
      if (!value)
        return Refuse(token,
                      "split must be numbers of layers joined by '-', such as "
                      "split3-5");
      if (layout_.split.size() == kMaxStages) return Refuse(token, "more than 4096 stages");
      layout_.split.push_back(*value);
      layers += *value;
      if (dash == std::string_view::npos) break;
      numbers.remove_prefix(dash + 1);
    }
    if (layers == 0) return Refuse(token, "a split must have at least one layer");
    return {};
  }

  Layout layout_;
  std::vector<std::string> seen_;
};

}  // namespace

Result<Layout> Layout::Parse(std::string_view text) {
  Result<Layout> layout = ParseExactly(text);
  if (layout) return layout;
  const std::string meant = SuggestLayout(text);
  if (!meant.empty()) layout.error().message += StrCat("; do you mean ", meant, "?");
  return layout;
}

Result<Layout> Layout::ParseExactly(std::string_view text) {
  if (text.empty()) return Fail(ErrorCode::kInvalid, "layout: empty");
  if (text.size() > kMaxLayoutText)
    return Fail(ErrorCode::kInvalid, "layout: longer than 4096 bytes");
  Parser parser;
  while (true) {
    const size_t end = text.find('_');
    CKPT_RETURN_IF_ERROR(parser.Token(text.substr(0, end)));
    if (end == std::string_view::npos) return parser.Finish();
    text.remove_prefix(end + 1);
  }
}

std::string Layout::ToString() const {
  std::string text;
  auto add = [&text](std::string_view token) {
    if (!text.empty()) text += '_';
    text += token;
  };
  for (const DegreeToken& degree : kDegrees) {
    if (this->*degree.field != 1) add(StrCat(degree.name, this->*degree.field));
  }
  if (zero != 0) add(StrCat("zero", zero));
  for (const DtypeToken& candidate : kDtypes) {
    if (dtype == candidate.dtype) add(candidate.name);
  }
  if (!split.empty()) {
    std::string numbers = "split";
    for (size_t i = 0; i < split.size(); ++i) {
      numbers += StrCat(i == 0 ? "" : "-", split[i]);
    }
    add(numbers);
  }
  if (naming == Naming::kPlain) add("plain");
  if (naming == Naming::kPipe) add("pipe");
  if (dialect != Dialect::kAsSource) add(DialectToken(dialect));
  for (const KeysToken& candidate : kKeys) {
    if (keys == candidate.keys) add(candidate.name);
  }
  return text.empty() ? "tp1" : text;
}

std::string_view DialectToken(Dialect dialect) {
  for (const DialectWord& candidate : kDialects) {
    if (candidate.dialect == dialect) return candidate.name;
  }
  return "";
}

RankCoordinate CoordinateOf(const Layout& layout, uint64_t rank) {
  CKPT_CHECK(rank < layout.World());
  RankCoordinate at;
  const uint64_t stage_ranks = uint64_t{layout.tp} * layout.cp * layout.dp;
  const uint64_t inside = rank % stage_ranks;
  at.pp = static_cast<uint32_t>(rank / stage_ranks);
  at.tp = static_cast<uint32_t>(inside % layout.tp);
  at.cp = static_cast<uint32_t>(inside / layout.tp % layout.cp);
  at.dp = static_cast<uint32_t>(inside / layout.tp / layout.cp);
  at.etp = static_cast<uint32_t>(inside % layout.etp);
  at.ep = static_cast<uint32_t>(inside / layout.etp % layout.ep);
  at.edp = static_cast<uint32_t>(inside / layout.etp / layout.ep);
  return at;
}

}  // namespace ckptfs
