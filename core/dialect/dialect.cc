// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/dialect.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/toml_file.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxRules = 4096;
constexpr size_t kMaxParts = 64;
constexpr uint64_t kMaxGroups = uint64_t{1} << 20;
constexpr uint64_t kMaxShare = uint64_t{1} << 31;

// Joins that need sizes of the model, and the keys beside them.
struct SizedJoin {
  std::string_view name;
  bool groups = false;       // `groups` is needed
  bool shares = false;       // `shares` is needed
  bool interleaved = false;  // of one tensor
};
constexpr SizedJoin kSizedJoins[] = {{"chunks", false, true, false},
                                     {"groups", true, true, false},
                                     {"heads", true, false, false},
                                     {"interleave2", true, false, true}};

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
  Result<std::optional<Expression>> Size(const toml::table& table, std::string_view key) const;
  Status ParseSizes(const toml::table& table, std::string_view join, MapRule& rule) const;
  Status ParseRows(const toml::table& table, MapRule& rule) const;
  Status ParseJoin(const toml::table& table, MapRule& rule) const;
  tl::unexpected<Error> RefuseJoin(const toml::table& table, std::string_view join) const;
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

Result<std::optional<Expression>> DialectParser::Size(const toml::table& table,
                                                      std::string_view key) const {
  CKPT_ASSIGN_OR_RETURN(const std::string text, Text(table, key));
  if (text.empty()) return std::optional<Expression>();
  auto size = Expression::Parse(text);
  if (!size) return Refuse(table, size.error().message);
  return std::optional(*std::move(size));
}

Status DialectParser::ParseSizes(const toml::table& table, std::string_view join,
                                 MapRule& rule) const {
  const auto sized =
      std::ranges::find(kSizedJoins, join, [](const SizedJoin& one) { return one.name; });
  const bool any = sized != std::end(kSizedJoins);
  CKPT_ASSIGN_OR_RETURN(rule.groups, Size(table, "groups"));
  CKPT_ASSIGN_OR_RETURN(rule.unit, Size(table, "unit"));
  if (table.get("shares") != nullptr) {
    CKPT_ASSIGN_OR_RETURN(const auto texts, Texts(table, "shares"));
    for (const std::string& text : texts) {
      auto share = Expression::Parse(text);
      if (!share) return Refuse(table, share.error().message);
      rule.shares.push_back(*std::move(share));
    }
    if (rule.shares.size() != rule.from.size()) {
      return Refuse(table, "'shares' must say one number for each 'from'");
    }
  }
  const bool groups = any && sized->groups, shares = any && sized->shares;
  if (groups != rule.groups.has_value()) {
    return Refuse(table,
                  StrCat("join '", join, "' ", groups ? "needs" : "does not have", " 'groups'"));
  }
  if (shares != !rule.shares.empty()) {
    return Refuse(table,
                  StrCat("join '", join, "' ", shares ? "needs" : "does not have", " 'shares'"));
  }
  if (!any && rule.unit) return Refuse(table, StrCat("join '", join, "' does not have a 'unit'"));
  rule.interleaved = any && sized->interleaved;
  if (rule.interleaved && rule.from.size() != 1) {
    return Refuse(table, "join 'interleave2' is of one tensor");
  }
  return {};
}

Status DialectParser::ParseRows(const toml::table& table, MapRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(rule.rows, Size(table, "rows"));
  const bool alone = rule.from.size() == 1 && !rule.dim && !rule.transpose;
  if (!rule.rows || (alone && rule.stack == Stack::kNone)) return {};
  return Refuse(table, "'rows' is of one tensor that is not joined, stacked or transposed");
}

Status DialectParser::ParseJoin(const toml::table& table, MapRule& rule) const {
  CKPT_ASSIGN_OR_RETURN(const std::string join, Text(table, "join"));
  CKPT_RETURN_IF_ERROR(ParseSizes(table, join, rule));
  if (join.empty() || join == "whole") {
    if (rule.from.size() == 1) return {};
    return Refuse(table, "several 'from' need a 'join'");
  }
  uint32_t dim = 0;
  if (join.starts_with("dim ")) {
    const std::string number = join.substr(4);
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), dim);
    const bool whole = error == std::errc() && end == number.data() + number.size();
    if (!whole || dim >= kMaxDimensions) return RefuseJoin(table, join);
  } else if (join != "rows" && std::ranges::find(kSizedJoins, join, [](const SizedJoin& one) {
                                 return one.name;
                               }) == std::end(kSizedJoins)) {
    return RefuseJoin(table, join);
  }
  rule.dim = dim;
  return {};
}

tl::unexpected<Error> DialectParser::RefuseJoin(const toml::table& table,
                                                std::string_view join) const {
  return Refuse(table,
                StrCat("join '", join,
                       "' cannot be inverted: known are whole, rows, dim N, chunks, groups, heads "
                       "and interleave2"),
                ErrorCode::kUnsupported);
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
  CKPT_RETURN_IF_ERROR(OnlyKeys(table, {"model_types", "to", "from", "join", "groups", "shares",
                                        "unit", "rows", "stack", "transpose"}));
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
  CKPT_RETURN_IF_ERROR(ParseRows(table, rule));
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
  CKPT_RETURN_IF_ERROR(OnlyKeys(file, {"name", "description", "whole", "map", "same"}));
  CKPT_ASSIGN_OR_RETURN(table_.name_, Text(file, "name"));
  if (table_.name_.empty()) {
    return Fail(ErrorCode::kInvalid, StrCat(origin_, ": 'name' is missing"));
  }
  table_.whole_ = file["whole"].value_or(false);
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

// ---- sizes --------------------------------------------------------------------------

namespace {

// A size of a rule: at least 1, at most `most`.
Result<uint64_t> Evaluate(const Expression& size, const FamilyVariables& sizes, uint64_t most) {
  const auto missing = size.Missing(sizes);
  if (!missing.empty()) {
    return Fail(
        Error{ErrorCode::kUnsupported, StrCat("nothing tells the model's '", missing.front(), "'")}
            .Needing(StrCat("give it: --family-set ", missing.front(), "=N")));
  }
  CKPT_ASSIGN_OR_RETURN(const int64_t value, size.Evaluate(sizes));
  if (value < 1 || static_cast<uint64_t>(value) > most) {
    return Refuse("'", size.text(), "' is ", value, ", which no model has");
  }
  return static_cast<uint64_t>(value);
}

// Dimension of a part that is dimension rule.dim of `to` without its stack.
size_t JoinedOf(const MapRule& rule, size_t dimensions) {
  const size_t dim = *rule.dim;
  if (!rule.transpose || dim + 2 < dimensions) return dim;
  return dim + 1 == dimensions ? dim - 1 : dim + 1;
}

Status Turn(const MapRule& rule, Shape& shape) {
  if (!rule.transpose) return {};
  if (shape.size() < 2) return Refuse("it does not have two dimensions to exchange");
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  return {};
}

Status CheckUnit(const RuleSizes& sizes, uint64_t unit) {
  if (!sizes.unit || *sizes.unit == unit) return {};
  return Refuse("its parts are of ", unit, " rows for each of ", *sizes.unit,
                " that the model's sizes say");
}

bool IsEmpty(const Shape& shape) { return std::ranges::find(shape, 0u) != shape.end(); }

// A box of both tensors: everything but along the joined dimension of the part.
BoxMap WholePart(const MapRule& rule, const Shape& file, const FilePart& part, uint32_t from) {
  BoxMap map;
  map.from = from;
  map.from_begin.assign(file.size(), 0);
  map.from_extent = file;
  for (size_t d = 0; d < file.size(); ++d) map.axis.push_back(static_cast<int8_t>(d));
  if (rule.transpose) std::swap(map.axis[file.size() - 1], map.axis[file.size() - 2]);
  map.to_begin.assign(file.size(), 0);
  if (rule.stack != Stack::kNone) {
    map.axis.insert(map.axis.begin(), -1);
    map.to_begin.insert(map.to_begin.begin(), part.number);
  }
  return map;
}

// Rows [in_file + k * file_step] of the part are rows [in_dialect + k * dialect_step], k < rows.
struct RowRun {
  uint64_t in_file = 0, file_step = 1;
  uint64_t in_dialect = 0, dialect_step = 1;
  uint64_t rows = 0;
};

// All rows of the part, in runs whose steps are 1 on one side: the file's if `to_file`, else the
// dialect's.
std::vector<RowRun> RunsOf(const MapRule& rule, const RuleSizes& sizes, uint64_t file_rows,
                           uint32_t part, bool to_file) {
  std::vector<RowRun> runs;
  const uint64_t rows = file_rows / sizes.groups;  // of a group
  const uint64_t unit = rows / sizes.shares[part];
  for (uint64_t g = 0; g < sizes.groups; ++g) {
    if (!rule.interleaved) {
      const uint64_t in_dialect = (g * sizes.Sum() + sizes.Before(part)) * unit;
      runs.push_back({g * rows, 1, in_dialect, 1, rows});
      continue;
    }
    const uint64_t half = rows / 2;
    for (uint64_t k = 0; k < (to_file ? 2 : half); ++k) {
      runs.push_back(to_file ? RowRun{g * rows + k * half, 1, g * rows + k, 2, half}
                             : RowRun{g * rows + k, half, g * rows + 2 * k, 1, 2});
    }
  }
  return runs;
}

}  // namespace

uint64_t RuleSizes::Sum() const {
  return std::accumulate(shares.begin(), shares.end(), uint64_t{0});
}

uint64_t RuleSizes::Before(uint32_t part) const {
  return std::accumulate(shares.begin(), shares.begin() + part, uint64_t{0});
}

Result<RuleSizes> SizesOfRule(const MapRule& rule, const FamilyVariables& sizes) {
  RuleSizes out;
  out.shares.assign(rule.from.size(), 1);
  if (rule.groups) {
    CKPT_ASSIGN_OR_RETURN(out.groups, Evaluate(*rule.groups, sizes, kMaxGroups));
  }
  for (size_t i = 0; i < rule.shares.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(out.shares[i], Evaluate(rule.shares[i], sizes, kMaxShare));
  }
  if (rule.rows && rule.rows->Missing(sizes).empty()) {
    CKPT_ASSIGN_OR_RETURN(out.rows, Evaluate(*rule.rows, sizes, kMaxShare));
  }
  if (rule.unit && rule.unit->Missing(sizes).empty()) {
    CKPT_ASSIGN_OR_RETURN(out.unit, Evaluate(*rule.unit, sizes, kMaxShare));
  }
  return out;
}

Result<FileShapes> FileShapesOf(const MapRule& rule, const RuleSizes& sizes, const Shape& to) {
  const size_t first = rule.stack == Stack::kNone ? 0 : 1;
  FileShapes out;
  if (to.size() < first) return Refuse("it does not have a dimension that is a stack");
  if (first == 1) out.stacked = to[0];
  const Shape one(to.begin() + static_cast<ptrdiff_t>(first), to.end());
  uint64_t unit = 0;
  if (rule.dim) {
    if (*rule.dim >= one.size()) return Refuse("it does not have ", *rule.dim + 1, " dimensions");
    const uint64_t joined = one[*rule.dim], pieces = sizes.groups * sizes.Sum();
    const uint64_t parts = rule.interleaved ? 2 * pieces : pieces;
    if (joined % parts != 0) {
      return Refuse(joined, " does not divide by its ", parts, rule.groups ? " pieces" : " parts");
    }
    unit = joined / pieces;
    CKPT_RETURN_IF_ERROR(CheckUnit(sizes, unit));
  }
  if (sizes.rows && (one.empty() || one[0] < *sizes.rows)) {
    return Refuse("it has fewer than the ", *sizes.rows, " rows that the model says");
  }
  for (size_t part = 0; part < rule.from.size(); ++part) {
    Shape& shape = out.parts.emplace_back(one);
    if (sizes.rows) shape[0] = *sizes.rows;
    if (rule.dim) shape[*rule.dim] = sizes.groups * sizes.shares[part] * unit;
    CKPT_RETURN_IF_ERROR(Turn(rule, shape));
  }
  return out;
}

Result<Shape> DialectShapeOf(const MapRule& rule, const RuleSizes& sizes, const FileShapes& file) {
  Shape out;
  std::optional<uint64_t> unit;
  for (size_t part = 0; part < file.parts.size(); ++part) {
    Shape one = file.parts[part];
    CKPT_RETURN_IF_ERROR(Turn(rule, one));
    if (rule.dim) {
      if (*rule.dim >= one.size()) return Refuse("it does not have ", *rule.dim + 1, " dimensions");
      uint64_t& rows = one[*rule.dim];
      const uint64_t pieces = sizes.groups * sizes.shares[part] * (rule.interleaved ? 2 : 1);
      if (rows % pieces != 0) return Refuse(rows, " does not divide by its ", pieces, " pieces");
      const uint64_t of_part = rows / (sizes.groups * sizes.shares[part]);
      if (unit.value_or(of_part) != of_part) {
        return Refuse("its parts have the shapes ", ShapeToString(file.parts[0]), " and ",
                      ShapeToString(file.parts[part]));
      }
      unit = of_part;
      CKPT_RETURN_IF_ERROR(CheckUnit(sizes, of_part));
      rows = 0;
    }
    if (part > 0 && one != out) {
      return Refuse("its parts have the shapes ", ShapeToString(file.parts[0]), " and ",
                    ShapeToString(file.parts[part]));
    }
    out = std::move(one);
  }
  if (rule.dim) {
    CKPT_ASSIGN_OR_RETURN(out[*rule.dim],
                          CheckedMul(*unit, sizes.groups * sizes.Sum(), "a joined dimension"));
  }
  if (rule.stack != Stack::kNone) out.insert(out.begin(), file.stacked);
  CKPT_RETURN_IF_ERROR(ElementCount(out));
  return out;
}

// ---- boxes --------------------------------------------------------------------------

std::vector<BoxMap> MapsOfPart(const MapRule& rule, const RuleSizes& sizes, const Shape& file,
                               const FilePart& part, uint32_t from) {
  const BoxMap whole = WholePart(rule, file, part, from);
  if (!rule.dim || IsEmpty(file)) return {whole};
  const size_t joined = JoinedOf(rule, file.size());
  const size_t in_dialect = *rule.dim + (rule.stack == Stack::kNone ? 0 : 1);
  std::vector<BoxMap> maps;
  for (const RowRun& run : RunsOf(rule, sizes, file[joined], part.part, false)) {
    BoxMap& map = maps.emplace_back(whole);
    map.from_begin[joined] = run.in_file;
    map.from_extent[joined] = run.rows;
    map.to_begin[in_dialect] = run.in_dialect;
    if (run.file_step > 1) {
      map.from_step.assign(file.size(), 1);
      map.from_step[joined] = run.file_step;
    }
  }
  return maps;
}

std::vector<BoxMap> MapsToPart(const MapRule& rule, const RuleSizes& sizes, const Shape& file,
                               const FilePart& part, uint32_t from) {
  const BoxMap whole = WholePart(rule, file, part, from);
  if (!rule.dim || IsEmpty(file)) return {Inverse(whole, from)};
  const size_t joined = JoinedOf(rule, file.size());
  const size_t in_dialect = *rule.dim + (rule.stack == Stack::kNone ? 0 : 1);
  std::vector<BoxMap> maps;
  for (const RowRun& run : RunsOf(rule, sizes, file[joined], part.part, true)) {
    BoxMap box = whole;
    box.from_begin[joined] = run.in_file;
    box.from_extent[joined] = run.rows;
    box.to_begin[in_dialect] = run.in_dialect;
    BoxMap& map = maps.emplace_back(Inverse(box, from));
    if (run.dialect_step > 1) {
      map.from_step.assign(map.from_begin.size(), 1);
      map.from_step[in_dialect] = run.dialect_step;
    }
  }
  return maps;
}

}  // namespace ckptfs
