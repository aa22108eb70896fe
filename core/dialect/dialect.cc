// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/dialect.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/toml_file.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxRules = 4096;
constexpr size_t kMaxParts = 64;
constexpr std::string_view kInverted[] = {"groups", "heads", "interleave2", "chunks"};

}  // namespace

// Reads one file; every refusal names the file and the line.
class DialectParser {
 public:
  explicit DialectParser(std::string_view origin) : origin_(origin) {}

  Result<DialectTable> Parse(const toml::table& file);

 private:
  tl::unexpected<Error> Refuse(const toml::node& node, std::string_view rule,
                               ErrorCode code = ErrorCode::kInvalid) const {
    return Fail(code, StrCat(origin_, ":", node.source().begin.line, ": ", rule));
  }
  Status OnlyKeys(const toml::table& table, std::initializer_list<std::string_view> known) const;
  Result<std::string> Text(const toml::table& table, std::string_view key) const;
  Result<std::vector<std::string>> Texts(const toml::table& table, std::string_view key) const;
  Status ParseJoin(const toml::table& table, MapRule& rule) const;
  Status ParseStack(const toml::table& table, MapRule& rule) const;
  Status CheckHoles(const toml::table& table, const MapRule& rule) const;
  Result<MapRule> ParseMap(const toml::table& table) const;
  Result<std::vector<const toml::table*>> Tables(const toml::table& file,
                                                 std::string_view key) const;

  std::string origin_;
  DialectTable table_;
};

Status DialectParser::OnlyKeys(const toml::table& table,
                               std::initializer_list<std::string_view> known) const {
  for (const auto& [key, value] : table) {
    if (std::ranges::find(known, key.str()) != known.end()) continue;
    return Refuse(value, StrCat("'", key.str(), "' is not a key of this table"));
  }
  return {};
}

Result<std::string> DialectParser::Text(const toml::table& table, std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return std::string();
  if (!node->is_string()) return Refuse(*node, StrCat("'", key, "' must be a text"));
  return node->as_string()->get();
}

Result<std::vector<std::string>> DialectParser::Texts(const toml::table& table,
                                                      std::string_view key) const {
  const toml::node* node = table.get(key);
  if (node == nullptr) return Refuse(table, StrCat("'", key, "' is missing"));
  if (!node->is_array() || node->as_array()->empty()) {
    return Refuse(*node, StrCat("'", key, "' must be a list of texts"));
  }
  std::vector<std::string> texts;
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_string()) return Refuse(item, StrCat("'", key, "' must be a list of texts"));
    texts.push_back(item.as_string()->get());
  }
  return texts;
}

Status DialectParser::ParseJoin(const toml::table& table, MapRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(const std::string join, Text(table, "join"));
  if (join.empty() || join == "whole") {
    if (rule.from.size() == 1) return {};
    return Refuse(table, "several 'from' need a 'join'");
  }
  if (std::ranges::find(kInverted, join) != std::end(kInverted)) {
    return Refuse(table, StrCat("join '", join, "' needs sizes of the model, which no table has"),
                  ErrorCode::kUnsupported);
  }
  uint32_t dim = 0;
  if (join != "rows") {
    const std::string number = join.starts_with("dim ") ? join.substr(4) : "";
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), dim);
    if (error != std::errc() || end != number.data() + number.size() || dim >= kMaxDimensions) {
      return Refuse(table,
                    StrCat("join '", join,
                           "' cannot be inverted: known are whole, rows and "
                           "dim N"),
                    ErrorCode::kUnsupported);
    }
  }
  rule.dim = dim;
  return {};
}

Status DialectParser::ParseStack(const toml::table& table, MapRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(const std::string stack, Text(table, "stack"));
  if (stack == "expert") {
    rule.stack = Stack::kExpert;
  } else if (stack == "layer") {
    rule.stack = Stack::kLayer;
  } else if (!stack.empty()) {
    return Refuse(table, "'stack' is expert or layer");
  }
  return {};
}

// A name on either side says all that one on the other side needs, but for the stack's number.
Status DialectParser::CheckHoles(const toml::table& table, const MapRule& rule) const {
  const auto has = [](const NameTemplate& name, std::string_view hole) {
    return name.text().find(hole) != std::string::npos;
  };
  for (const auto& [hole, stack] :
       {std::pair("{layer}", Stack::kLayer), std::pair("{expert}", Stack::kExpert)}) {
    for (const NameTemplate& from : rule.from) {
      const bool wanted = has(*rule.to, hole) || rule.stack == stack;
      const bool both = has(*rule.to, hole) && rule.stack == stack;
      if (has(from, hole) == wanted && !both) continue;
      return Refuse(table, StrCat("'", from.text(), "' and '", rule.to->text(),
                                  "' do not say the same of ", hole));
    }
  }
  std::vector<const NameTemplate*> all = {&*rule.to};
  for (const NameTemplate& from : rule.from) all.push_back(&from);
  for (const NameTemplate* name : all) {
    NameHoles holes;
    holes.layer = holes.expert = 0;
    if (!name->Render(holes, std::nullopt) || has(*name, "{rest}")) {
      return Refuse(table,
                    StrCat("'", name->text(),
                           "' cannot be inverted: a name of a map has no "
                           "holes but {layer} and {expert}"),
                    ErrorCode::kUnsupported);
    }
  }
  return {};
}

Result<MapRule> DialectParser::ParseMap(const toml::table& table) const {
  CKPT_RETURN_IF_ERROR(
      OnlyKeys(table, {"model_types", "to", "from", "join", "stack", "transpose"}));
  MapRule rule;
  CKPT_ASSIGN_OR_RETURN(const auto types, Texts(table, "model_types"));
  rule.model_types.insert(types.begin(), types.end());
  CKPT_ASSIGN_OR_RETURN(const std::string to, Text(table, "to"));
  auto name = NameTemplate::Parse(to);
  if (!name) return Refuse(table, name.error().message);
  rule.to = *std::move(name);
  CKPT_ASSIGN_OR_RETURN(const auto from, Texts(table, "from"));
  if (from.size() > kMaxParts) return Refuse(table, "more than 64 parts");
  for (const std::string& text : from) {
    auto part = NameTemplate::Parse(text);
    if (!part) return Refuse(table, part.error().message);
    rule.from.push_back(*std::move(part));
  }
  CKPT_RETURN_IF_ERROR(ParseJoin(table, rule));
  CKPT_RETURN_IF_ERROR(ParseStack(table, rule));
  if (const toml::node* transpose = table.get("transpose")) {
    if (!transpose->is_boolean()) return Refuse(*transpose, "'transpose' must be true or false");
    rule.transpose = transpose->as_boolean()->get();
  }
  CKPT_RETURN_IF_ERROR(CheckHoles(table, rule));
  return rule;
}

Result<std::vector<const toml::table*>> DialectParser::Tables(const toml::table& file,
                                                              std::string_view key) const {
  std::vector<const toml::table*> tables;
  const toml::node* node = file.get(key);
  if (node == nullptr) return tables;
  const auto refuse = [&] { return Refuse(*node, StrCat("[[", key, "]] is a list of tables")); };
  if (!node->is_array()) return refuse();
  if (node->as_array()->size() > kMaxRules) return Refuse(*node, "more than 4096 entries");
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_table()) return refuse();
    tables.push_back(item.as_table());
  }
  return tables;
}

Result<DialectTable> DialectParser::Parse(const toml::table& file) {
  CKPT_RETURN_IF_ERROR(OnlyKeys(file, {"name", "description", "map", "same"}));
  CKPT_ASSIGN_OR_RETURN(table_.name_, Text(file, "name"));
  if (table_.name_.empty()) {
    return Fail(ErrorCode::kInvalid, StrCat(origin_, ": 'name' is missing"));
  }
  CKPT_ASSIGN_OR_RETURN(const auto maps, Tables(file, "map"));
  for (const toml::table* map : maps) {
    CKPT_ASSIGN_OR_RETURN(MapRule rule, ParseMap(*map));
    table_.rules_.push_back(std::move(rule));
  }
  CKPT_ASSIGN_OR_RETURN(const auto same, Tables(file, "same"));
  for (const toml::table* one : same) {
    CKPT_RETURN_IF_ERROR(OnlyKeys(*one, {"model_types"}));
    CKPT_ASSIGN_OR_RETURN(const auto types, Texts(*one, "model_types"));
    table_.same_.insert(types.begin(), types.end());
  }
  return std::move(table_);
}

Result<DialectTable> DialectTable::Parse(std::string_view toml, std::string_view origin) {
  CKPT_ASSIGN_OR_RETURN(const toml::table file, ParseToml(toml, origin));
  return DialectParser(origin).Parse(file);
}

std::vector<const MapRule*> DialectTable::RulesOf(std::string_view model_type) const {
  std::vector<const MapRule*> rules;
  for (const MapRule& rule : rules_) {
    if (rule.model_types.contains(model_type)) rules.push_back(&rule);
  }
  return rules;
}

bool DialectTable::Knows(std::string_view model_type) const {
  return same_.contains(model_type) || !RulesOf(model_type).empty();
}

Result<FileShape> FileShapeOf(const MapRule& rule, const Shape& to) {
  const size_t first = rule.stack == Stack::kNone ? 0 : 1;
  FileShape out;
  if (to.size() < first) return Refuse("it does not have a dimension that is a stack");
  if (first == 1) out.stacked = to[0];
  out.shape.assign(to.begin() + static_cast<ptrdiff_t>(first), to.end());
  if (rule.dim) {
    if (*rule.dim >= out.shape.size())
      return Refuse("it does not have ", *rule.dim + 1, " dimensions");
    uint64_t& joined = out.shape[*rule.dim];
    if (joined % rule.from.size() != 0) {
      return Refuse(joined, " does not divide by its ", rule.from.size(), " parts");
    }
    joined /= rule.from.size();
  }
  if (rule.transpose) {
    if (out.shape.size() < 2) return Refuse("it does not have two dimensions to exchange");
    std::swap(out.shape[out.shape.size() - 1], out.shape[out.shape.size() - 2]);
  }
  return out;
}

Result<Shape> DialectShapeOf(const MapRule& rule, const FileShape& file) {
  Shape out = file.shape;
  if (rule.transpose) {
    if (out.size() < 2) return Refuse("it does not have two dimensions to exchange");
    std::swap(out[out.size() - 1], out[out.size() - 2]);
  }
  if (rule.dim) {
    if (*rule.dim >= out.size()) return Refuse("it does not have ", *rule.dim + 1, " dimensions");
    CKPT_ASSIGN_OR_RETURN(out[*rule.dim],
                          CheckedMul(out[*rule.dim], rule.from.size(), "a joined dimension"));
  }
  if (rule.stack != Stack::kNone) out.insert(out.begin(), file.stacked);
  CKPT_RETURN_IF_ERROR(ElementCount(out));
  return out;
}

BoxMap MapOfPart(const MapRule& rule, const Shape& file, const FilePart& part, uint32_t from) {
  BoxMap map;
  map.from = from;
  map.from_begin.assign(file.size(), 0);
  map.from_extent = file;
  for (size_t d = 0; d < file.size(); ++d) map.axis.push_back(static_cast<int8_t>(d));
  if (rule.transpose) std::swap(map.axis[file.size() - 1], map.axis[file.size() - 2]);
  map.to_begin.assign(file.size(), 0);
  if (rule.dim) {
    map.to_begin[*rule.dim] = part.part * file[static_cast<size_t>(map.axis[*rule.dim])];
  }
  if (rule.stack != Stack::kNone) {
    map.axis.insert(map.axis.begin(), -1);
    map.to_begin.insert(map.to_begin.begin(), part.number);
  }
  return map;
}

}  // namespace ckptfs
