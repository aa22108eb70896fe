// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/base/strings.h"
#include "core/model/family_rules.h"
#include "core/model/toml_file.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxRules = 4096;
constexpr uint32_t kMaxDim = 64;

// Reads one file; every refusal names the file and the line.
class FamilyParser {
 public:
  explicit FamilyParser(std::string_view origin) : origin_(origin) {}

  Result<FamilyRules> Parse(const toml::table& file);

 private:
  tl::unexpected<Error> Refuse(const toml::node& node, std::string_view rule) const {
    return Fail(ErrorCode::kInvalid, StrCat(origin_, ":", node.source().begin.line, ": ", rule));
  }

  // An unknown key is a misspelling: refused.
  Status OnlyKeys(const toml::table& table, std::initializer_list<std::string_view> known) const;
  Result<std::string> Text(const toml::table& table, std::string_view key) const;
  Result<bool> Flag(const toml::table& table, std::string_view key) const;
  Result<uint32_t> Dim(const toml::table& table, uint32_t absent) const;
  Result<NameTemplate> Template(const toml::node& node) const;
  Result<NameTemplate> TemplateOf(const toml::table& table, std::string_view key) const;
  // A number or a text.
  Result<Expression> Size(const toml::node& node) const;
  Result<std::optional<Expression>> SizeOf(const toml::table& table, std::string_view key) const;
  Result<std::vector<Expression>> SizesOf(const toml::table& table, std::string_view key) const;

  Result<CutRule> ParseCut(const toml::table& table, uint32_t absent_dim) const;
  Status ParsePattern(const toml::table& table, FamilyRule& rule) const;
  Status ParseCuts(const toml::table& table, uint32_t absent_dim, FamilyRule& rule) const;
  Status ParseStage(const toml::table& table, FamilyRule& rule) const;
  Result<FamilyRule> ParseRule(const toml::table& table) const;
  Result<RenameRule> ParseRename(const toml::table& table) const;
  Result<DeriveRule> ParseDerive(const toml::table& table) const;
  Result<CheckRule> ParseCheck(const toml::table& table) const;
  Status ParseVariables(const toml::table& file);

  template <class Item, class Function>
  Status ParseAll(const toml::table& file, std::string_view key, std::vector<Item>& items,
                  Function parse) const;

  std::string origin_;
  FamilyRules family_;
};

Status FamilyParser::OnlyKeys(const toml::table& table,
                              std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : table) {
    bool found = false;
    for (std::string_view name : known) found = found || key.str() == name;
    if (!found) return Refuse(value, StrCat("'", key.str(), "' is not a key of this table"));
  }
  return {};
}

Result<std::string> FamilyParser::Text(const toml::table& table, std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return std::string();
  if (!node->is_string()) return Refuse(*node, StrCat("'", key, "' must be a text"));
  return node->as_string()->get();
}

Result<bool> FamilyParser::Flag(const toml::table& table, std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return false;
  if (!node->is_boolean()) return Refuse(*node, StrCat("'", key, "' must be true or false"));
  return node->as_boolean()->get();
}

Result<uint32_t> FamilyParser::Dim(const toml::table& table, uint32_t absent) const {
  const toml::node* node = table.get("dim");
  if (node == nullptr) return absent;
  if (!node->is_integer() || node->as_integer()->get() < 0 ||
      node->as_integer()->get() >= kMaxDim) {
    return Refuse(*node, "'dim' must be a number from 0 to 63");
  }
  return static_cast<uint32_t>(node->as_integer()->get());
}

Result<NameTemplate> FamilyParser::Template(const toml::node& node) const {
  if (!node.is_string()) return Refuse(node, "a name template must be a text");
  auto parsed = NameTemplate::Parse(node.as_string()->get());
  if (!parsed) return Refuse(node, parsed.error().message);
  return parsed;
}

Result<NameTemplate> FamilyParser::TemplateOf(const toml::table& table,
                                              std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return Refuse(table, StrCat("'", key, "' is missing"));
  return Template(*node);
}

Result<Expression> FamilyParser::Size(const toml::node& node) const {
  std::string text;
  if (node.is_integer()) {
    text = StrCat(node.as_integer()->get());
  } else if (node.is_string()) {
    text = node.as_string()->get();
  } else {
    return Refuse(node, "a size must be a number or an expression");
  }
  auto parsed = Expression::Parse(text);
  if (!parsed) return Refuse(node, parsed.error().message);
  return parsed;
}

Result<std::optional<Expression>> FamilyParser::SizeOf(const toml::table& table,
                                                       std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return std::optional<Expression>();
  CKPT_ASSIGN_OR_RETURN(Expression size, Size(*node));
  return std::optional<Expression>(std::move(size));
}

Result<std::vector<Expression>> FamilyParser::SizesOf(const toml::table& table,
                                                      std::string_view key) const {
  std::vector<Expression> sizes;
  const toml::node* node = table.get(key);
  if (node == nullptr) return sizes;
  if (!node->is_array()) return Refuse(*node, StrCat("'", key, "' must be a list of sizes"));
  for (const toml::node& item : *node->as_array()) {
    CKPT_ASSIGN_OR_RETURN(Expression size, Size(item));
    sizes.push_back(std::move(size));
  }
  return sizes;
}

Result<CutRule> FamilyParser::ParseCut(const toml::table& table, uint32_t absent_dim) const {
  CutRule cut;
  CKPT_ASSIGN_OR_RETURN(cut.dim, Dim(table, absent_dim));
  CKPT_ASSIGN_OR_RETURN(cut.parts, SizesOf(table, "parts"));
  CKPT_ASSIGN_OR_RETURN(cut.unit, SizeOf(table, "unit"));
  CKPT_ASSIGN_OR_RETURN(cut.pad_multiple, SizeOf(table, "pad_multiple"));
  CKPT_ASSIGN_OR_RETURN(cut.pad_always, Flag(table, "pad_always"));
  CKPT_ASSIGN_OR_RETURN(cut.rows, SizeOf(table, "rows"));
  if (cut.pad_multiple && cut.parts.size() > 1) {
    return Refuse(table, "a cut may have several parts or padding, not both");
  }
  return cut;
}

Status FamilyParser::ParseCuts(const toml::table& table, uint32_t absent_dim,
                               FamilyRule& rule) const {
  rule.kind = PatternKind::kShard;
  const toml::node* cuts = table.get("cuts");
  if (cuts == nullptr) {
    CKPT_ASSIGN_OR_RETURN(CutRule cut, ParseCut(table, absent_dim));
    rule.cuts.push_back(std::move(cut));
    return {};
  }
  if (!cuts->is_array()) return Refuse(*cuts, "'cuts' is a list of tables");
  for (const toml::node& item : *cuts->as_array()) {
    if (!item.is_table()) return Refuse(item, "'cuts' is a list of tables");
    CKPT_RETURN_IF_ERROR(
        OnlyKeys(*item.as_table(), {"dim", "parts", "unit", "pad_multiple", "pad_always", "rows"}));
    CKPT_ASSIGN_OR_RETURN(CutRule cut, ParseCut(*item.as_table(), 0));
    rule.cuts.push_back(std::move(cut));
  }
  CKPT_ASSIGN_OR_RETURN(rule.grid, SizesOf(table, "grid"));
  if (rule.cuts.empty() || rule.grid.size() != rule.cuts.size()) {
    return Refuse(table, "'grid' must have one number of ranks per cut");
  }
  return {};
}

Status FamilyParser::ParsePattern(const toml::table& table, FamilyRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(const std::string pattern, Text(table, "pattern"));
  CKPT_ASSIGN_OR_RETURN(rule.bias_scaled, Flag(table, "bias_scaled"));
  if (pattern == "replicate") {
    rule.kind = PatternKind::kReplicate;
  } else if (pattern == "average") {
    rule.kind = PatternKind::kPartial;
  } else if (pattern == "unique") {
    rule.kind = PatternKind::kUnique;
  } else if (pattern == "unknown") {
    rule.kind = PatternKind::kUnknown;
  } else if (pattern == "column" || pattern == "shard") {
    return ParseCuts(table, 0, rule);
  } else if (pattern == "row") {
    return ParseCuts(table, 1, rule);
  } else if (pattern == "vocab") {
    CKPT_RETURN_IF_ERROR(ParseCuts(table, 0, rule));
    CutRule& cut = rule.cuts.front();
    if (!cut.pad_multiple) {
      CKPT_ASSIGN_OR_RETURN(cut.pad_multiple, Expression::Parse("vocab_multiple"));
    }
    if (!cut.rows) {
      CKPT_ASSIGN_OR_RETURN(cut.rows, Expression::Parse("vocab"));
    }
  } else {
    return Refuse(table,
                  "'pattern' is replicate, column, row, vocab, shard, average, unique or "
                  "unknown");
  }
  return {};
}

Status FamilyParser::ParseStage(const toml::table& table, FamilyRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(const std::string stage, Text(table, "stage"));
  bool has_layer = true;
  for (const NameTemplate& match : rule.match) {
    has_layer = has_layer && match.text().find("{layer}") != std::string::npos;
  }
  if (stage == "layer" || (stage.empty() && has_layer)) {
    if (!has_layer) return Refuse(table, "stage 'layer' needs {layer} in the name");
    rule.stage = StageRule::kLayer;
  } else if (stage == "first") {
    rule.stage = StageRule::kFirst;
  } else if (stage == "last") {
    rule.stage = StageRule::kLast;
  } else if (stage == "first_last") {
    rule.stage = StageRule::kFirstLast;
  } else if (!stage.empty() && stage != "every") {
    return Refuse(table, "'stage' is first, last, first_last, layer or every");
  }
  return {};
}

Result<FamilyRule> FamilyParser::ParseRule(const toml::table& table) const {
  CKPT_RETURN_IF_ERROR(OnlyKeys(
      table, {"match", "pattern", "dim", "parts", "unit", "pad_multiple", "pad_always", "rows",
              "cuts", "grid", "bias_scaled", "stage", "stacked_experts", "only_if_equal"}));
  FamilyRule rule;
  const toml::node* match = table.get("match");
  if (match == nullptr) return Refuse(table, "'match' is missing");
  if (match->is_array()) {
    for (const toml::node& item : *match->as_array()) {
      CKPT_ASSIGN_OR_RETURN(NameTemplate name, Template(item));
      rule.match.push_back(std::move(name));
    }
  } else {
    CKPT_ASSIGN_OR_RETURN(NameTemplate name, Template(*match));
    rule.match.push_back(std::move(name));
  }
  if (rule.match.empty()) return Refuse(*match, "'match' is empty");
  rule.text = StrCat(family_.name, ": ", rule.match.front().text());
  CKPT_RETURN_IF_ERROR(ParsePattern(table, rule));
  CKPT_RETURN_IF_ERROR(ParseStage(table, rule));
  CKPT_ASSIGN_OR_RETURN(rule.stacked_experts, SizeOf(table, "stacked_experts"));
  CKPT_ASSIGN_OR_RETURN(rule.only_if_equal, SizesOf(table, "only_if_equal"));
  if (!rule.only_if_equal.empty() && rule.only_if_equal.size() != 2) {
    return Refuse(table, "'only_if_equal' is a list of two sizes");
  }
  return rule;
}

Result<RenameRule> FamilyParser::ParseRename(const toml::table& table) const {
  CKPT_RETURN_IF_ERROR(OnlyKeys(table, {"plain", "pipe", "tied"}));
  CKPT_ASSIGN_OR_RETURN(NameTemplate plain, TemplateOf(table, "plain"));
  CKPT_ASSIGN_OR_RETURN(NameTemplate pipe, TemplateOf(table, "pipe"));
  RenameRule rename{std::move(plain), std::move(pipe), std::nullopt};
  if (table.get("tied") != nullptr) {
    CKPT_ASSIGN_OR_RETURN(rename.tied, Flag(table, "tied"));
  }
  return rename;
}

Result<DeriveRule> FamilyParser::ParseDerive(const toml::table& table) const {
  CKPT_RETURN_IF_ERROR(OnlyKeys(table, {"variable", "parameter", "dim", "value"}));
  DeriveRule derive;
  CKPT_ASSIGN_OR_RETURN(derive.variable, Text(table, "variable"));
  if (derive.variable.empty()) return Refuse(table, "'variable' is missing");
  CKPT_ASSIGN_OR_RETURN(derive.value, SizeOf(table, "value"));
  if (!derive.value) {
    CKPT_ASSIGN_OR_RETURN(derive.parameter, TemplateOf(table, "parameter"));
  } else if (table.get("parameter") != nullptr || table.get("dim") != nullptr) {
    return Refuse(table, "a size has either a 'value' or a 'parameter' and its 'dim'");
  }
  CKPT_ASSIGN_OR_RETURN(derive.dim, Dim(table, 0));
  return derive;
}

Result<CheckRule> FamilyParser::ParseCheck(const toml::table& table) const {
  CKPT_RETURN_IF_ERROR(OnlyKeys(table, {"equal"}));
  CKPT_ASSIGN_OR_RETURN(std::vector<Expression> sides, SizesOf(table, "equal"));
  if (sides.size() != 2) return Refuse(table, "'equal' is a list of two sizes");
  return CheckRule{std::move(sides[0]), std::move(sides[1])};
}

Status FamilyParser::ParseVariables(const toml::table& file) {
  const toml::node* variables = file.get("variables");
  if (variables == nullptr) return {};
  if (!variables->is_table()) return Refuse(*variables, "[variables] is a table");
  for (const auto& [key, value] : *variables->as_table()) {
    if (!value.is_integer()) return Refuse(value, "a variable is a whole number");
    family_.defaults.emplace(std::string(key.str()), value.as_integer()->get());
  }
  return {};
}

template <class Item, class Function>
Status FamilyParser::ParseAll(const toml::table& file, std::string_view key,
                              std::vector<Item>& items, Function parse) const {
  const toml::node* node = file.get(key);
  if (node == nullptr) return {};
  if (!node->is_array()) return Refuse(*node, StrCat("[[", key, "]] is a list of tables"));
  if (node->as_array()->size() > kMaxRules) return Refuse(*node, "more than 4096 entries");
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_table()) return Refuse(item, StrCat("[[", key, "]] is a list of tables"));
    auto parsed = parse(*item.as_table());
    if (!parsed) return Fail(std::move(parsed).error());
    items.push_back(*std::move(parsed));
  }
  return {};
}

Result<FamilyRules> FamilyParser::Parse(const toml::table& file) {
  CKPT_RETURN_IF_ERROR(
      OnlyKeys(file, {"name", "description", "variables", "rule", "rename", "derive", "check"}));
  CKPT_ASSIGN_OR_RETURN(family_.name, Text(file, "name"));
  if (family_.name.empty())
    return Fail(ErrorCode::kInvalid, StrCat(origin_, ": 'name' is missing"));
  CKPT_RETURN_IF_ERROR(ParseVariables(file));
  CKPT_RETURN_IF_ERROR(
      ParseAll(file, "rule", family_.rules, [this](const toml::table& t) { return ParseRule(t); }));
  CKPT_RETURN_IF_ERROR(ParseAll(file, "rename", family_.renames,
                                [this](const toml::table& t) { return ParseRename(t); }));
  CKPT_RETURN_IF_ERROR(ParseAll(file, "derive", family_.derives,
                                [this](const toml::table& t) { return ParseDerive(t); }));
  CKPT_RETURN_IF_ERROR(ParseAll(file, "check", family_.checks,
                                [this](const toml::table& t) { return ParseCheck(t); }));
  return std::move(family_);
}

}  // namespace

Result<FamilyRules> ParseFamily(std::string_view text, std::string_view origin) {
  CKPT_ASSIGN_OR_RETURN(const toml::table file, ParseToml(text, origin));
  CKPT_ASSIGN_OR_RETURN(FamilyRules rules, FamilyParser(origin).Parse(file));
  rules.text = text;
  return rules;
}

}  // namespace ckptfs
