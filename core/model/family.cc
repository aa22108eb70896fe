// SPDX-License-Identifier: Apache-2.0
#include "core/model/family.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/family_rules.h"
#include "core/model/shipped_families.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxFile = 1 << 20;

struct Found {
  const FamilyRule* rule = nullptr;
  NameHoles holes;
  bool tied = false;  // a pipeline's name of a tied module
};

// A name's plain spelling in a pipeline, and whether the module is tied.
struct Spelling {
  std::string plain;
  bool tied = false;
};

std::optional<uint32_t> LayersOf(const FamilyVariables& variables) {
  const auto found = variables.find("layers");
  if (found == variables.end() || found->second <= 0 || found->second > UINT32_MAX) {
    return std::nullopt;
  }
  return static_cast<uint32_t>(found->second);
}

std::vector<Spelling> PlainSpellings(const FamilyRules& family, std::string_view name,
                                     std::optional<uint32_t> layers) {
  std::vector<Spelling> names;
  for (const RenameRule& rename : family.renames) {
    const auto holes = rename.pipe.Match(name, layers);
    if (!holes) continue;
    if (auto plain = rename.plain.Render(*holes, layers)) {
      names.push_back(Spelling{*std::move(plain), rename.tied.value_or(false)});
    }
  }
  return names;
}

// Whether the rule's condition holds; yes if it cannot be told.
bool Applies(const FamilyRule& rule, const FamilyVariables* variables) {
  if (rule.only_if_equal.size() != 2 || variables == nullptr) return true;
  const auto left = rule.only_if_equal[0].Evaluate(*variables);
  const auto right = rule.only_if_equal[1].Evaluate(*variables);
  return !left || !right || *left == *right;
}

// `variables` null: conditions are not asked.
std::optional<Found> FindDirect(const FamilyRules& family, std::string_view name,
                                std::optional<uint32_t> layers,
                                const FamilyVariables* variables) {
  for (const FamilyRule& rule : family.rules) {
    for (const NameTemplate& match : rule.match) {
      auto holes = match.Match(name, layers);
      if (holes && Applies(rule, variables)) return Found{&rule, *std::move(holes), false};
    }
  }
  return std::nullopt;
}

// The holes are those of the plain spelling: where the expert stands in `name`.
// False if the two are not spelled alike from it on.
bool PlaceExpert(std::string_view name, std::string_view plain, NameHoles& holes) {
  const std::string_view from_expert = plain.substr(holes.expert_at);
  if (!name.ends_with(from_expert)) return false;
  holes.expert_at = name.size() - from_expert.size();
  return true;
}

std::optional<Found> FindRule(const FamilyRules& family, std::string_view name,
                              std::optional<uint32_t> layers,
                              const FamilyVariables* variables = nullptr) {
  if (auto found = FindDirect(family, name, layers, variables)) return found;
  for (const Spelling& spelling : PlainSpellings(family, name, layers)) {
    if (auto found = FindDirect(family, spelling.plain, layers, variables)) {
      found->tied = spelling.tied;
      if (found->holes.expert && !PlaceExpert(name, spelling.plain, found->holes)) {
        found->holes.expert.reset();
      }
      return found;
    }
  }
  return std::nullopt;
}

// 1 + the greatest layer number that a rule finds in the names.
std::optional<uint32_t> CountLayers(const FamilyRules& family,
                                    std::span<const NamedShape> parameters) {
  std::optional<uint32_t> layers;
  for (const auto& [name, shape] : parameters) {
    const auto found = FindRule(family, name, std::nullopt);
    if (found && found->holes.layer && *found->holes.layer < UINT32_MAX) {
      layers = std::max(layers.value_or(0), *found->holes.layer + 1);
    }
  }
  return layers;
}

// The whole parameter's size along `dim`.
std::optional<int64_t> WholeSize(const FamilyRules& family, const NamedShape& parameter,
                                 uint32_t dim, uint64_t degree, std::optional<uint32_t> layers) {
  if (dim >= parameter.second.size()) return std::nullopt;
  uint64_t size = parameter.second[dim];
  const auto found = FindRule(family, parameter.first, layers);
  if (degree > 1) {
    if (!found || found->rule->kind == PatternKind::kUnknown) return std::nullopt;
    for (const CutRule& cut : found->rule->cuts) {
      if (cut.dim != dim) continue;
      if (found->rule->cuts.size() > 1 || cut.pad_multiple) return std::nullopt;
      const auto whole = CheckedMul(size, degree, "size");
      if (!whole) return std::nullopt;
      size = *whole;
    }
  }
  if (size > INT64_MAX) return std::nullopt;
  return static_cast<int64_t>(size);
}

// Evaluates sizes of one rule; remembers which variables are missing.
class Sizes {
 public:
  explicit Sizes(const FamilyVariables& variables) : variables_(variables) {}

  Result<uint64_t> Of(const Expression& expression) {
    for (const std::string& name : expression.Missing(variables_)) {
      if (std::find(missing_.begin(), missing_.end(), name) == missing_.end()) {
        missing_.push_back(name);
      }
    }
    if (!missing_.empty()) return 0;
    CKPT_ASSIGN_OR_RETURN(const int64_t value, expression.Evaluate(variables_));
    if (value < 0) {
      return Fail(ErrorCode::kInvalid, StrCat("expression '", expression.text(), "' is ", value));
    }
    return static_cast<uint64_t>(value);
  }
  // Nothing if a variable is missing.
  Result<std::optional<uint64_t>> IfKnown(const std::optional<Expression>& expression) {
    if (!expression || !expression->Missing(variables_).empty()) return std::optional<uint64_t>();
    CKPT_ASSIGN_OR_RETURN(const uint64_t value, Of(*expression));
    return std::optional<uint64_t>(value);
  }
  std::string Missing() const {
    std::string text;
    for (const std::string& name : missing_) text += StrCat(text.empty() ? "" : ", ", name);
    return text;
  }

 private:
  const FamilyVariables& variables_;
  std::vector<std::string> missing_;
};

Result<Cut> MakeCut(const CutRule& rule, Sizes& sizes) {
  Cut cut;
  cut.dim = rule.dim;
  for (const Expression& part : rule.parts) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, sizes.Of(part));
    cut.parts.push_back(size);
  }
  CKPT_ASSIGN_OR_RETURN(const auto rows, sizes.IfKnown(rule.rows));
  if (rows) cut.parts.assign(1, *rows);
  CKPT_ASSIGN_OR_RETURN(const auto unit, sizes.IfKnown(rule.unit));
  cut.unit = std::max<uint64_t>(unit.value_or(1), 1);
  if (rule.pad_multiple) {
    CKPT_ASSIGN_OR_RETURN(cut.pad_multiple, sizes.Of(*rule.pad_multiple));
  }
  cut.pad_always = rule.pad_always;
  return cut;
}

Result<Pattern> MakePattern(const FamilyRule& rule, Sizes& sizes) {
  Pattern pattern;
  pattern.kind = rule.kind;
  pattern.bias_scaled = rule.bias_scaled;
  for (const CutRule& cut : rule.cuts) {
    CKPT_ASSIGN_OR_RETURN(Cut made, MakeCut(cut, sizes));
    pattern.cuts.push_back(std::move(made));
  }
  for (const Expression& along : rule.grid) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t ranks, sizes.Of(along));
    pattern.grid.push_back(ranks);
  }
  return pattern;
}

}  // namespace

Family::Family() : rules_(std::make_unique<FamilyRules>()) {}
Family::~Family() = default;
Family::Family(Family&&) noexcept = default;
Family& Family::operator=(Family&&) noexcept = default;

Result<Family> Family::Parse(std::string_view toml, std::string_view origin) {
  CKPT_ASSIGN_OR_RETURN(FamilyRules rules, ParseFamily(toml, origin));
  Family family;
  *family.rules_ = std::move(rules);
  return family;
}

const std::string& Family::name() const { return rules_->name; }

FamilyVariables Family::Derive(std::span<const NamedShape> parameters, uint64_t degree,
                               const FamilyVariables& given) const {
  FamilyVariables variables = given;
  if (!variables.contains("layers")) {
    if (const auto layers = CountLayers(*rules_, parameters)) variables["layers"] = *layers;
  }
  const auto layers = LayersOf(variables);
  for (const DeriveRule& derive : rules_->derives) {
    if (variables.contains(derive.variable)) continue;
    for (const NamedShape& parameter : parameters) {
      bool matches = derive.parameter.Match(parameter.first, layers).has_value();
      for (const Spelling& spelling : PlainSpellings(*rules_, parameter.first, layers)) {
        matches = matches || derive.parameter.Match(spelling.plain, layers).has_value();
      }
      if (!matches) continue;
      const auto size = WholeSize(*rules_, parameter, derive.dim, degree, layers);
      if (!size) continue;
      variables[derive.variable] = *size;
      break;
    }
  }
  variables.insert(rules_->defaults.begin(), rules_->defaults.end());  // keeps what is there
  return variables;
}

Result<std::optional<RuleMatch>> Family::Match(std::string_view parameter,
                                               const FamilyVariables& given) const {
  FamilyVariables with_defaults;
  const FamilyVariables* variables = &given;
  for (const auto& [name, value] : rules_->defaults) {
    if (given.contains(name)) continue;
    if (variables == &given) {
      with_defaults = given;
      variables = &with_defaults;
    }
    with_defaults.emplace(name, value);
  }
  const auto found = FindRule(*rules_, parameter, LayersOf(*variables), variables);
  if (!found) return std::optional<RuleMatch>();
  const FamilyRule& rule = *found->rule;
  RuleMatch match;
  match.rule = rule.text;
  const bool at_an_end = rule.stage == StageRule::kFirst || rule.stage == StageRule::kLast;
  match.stage = found->tied && at_an_end ? StageRule::kFirstLast : rule.stage;
  match.layer = found->holes.layer;
  match.expert = found->holes.expert;
  match.expert_at = static_cast<uint32_t>(found->holes.expert_at);
  Sizes sizes(*variables);
  auto pattern = MakePattern(rule, sizes);
  if (!pattern) return Fail(std::move(pattern).error().WithContext(rule.text));
  for (const Expression& side : rule.only_if_equal) {
    auto value = sizes.Of(side);
    if (!value) return Fail(std::move(value).error().WithContext(rule.text));
  }
  if (rule.stacked_experts) {
    auto experts = sizes.Of(*rule.stacked_experts);
    if (!experts) return Fail(std::move(experts).error().WithContext(rule.text));
    match.stacked_experts = static_cast<uint32_t>(std::min<uint64_t>(*experts, UINT32_MAX));
  }
  match.missing = sizes.Missing();
  if (match.missing.empty()) match.pattern = *std::move(pattern);
  return std::optional<RuleMatch>(std::move(match));
}

size_t Family::CountMatches(std::span<const std::string> names) const {
  std::vector<NamedShape> parameters;
  parameters.reserve(names.size());
  for (const std::string& name : names) parameters.emplace_back(name, Shape{});
  const auto layers = CountLayers(*rules_, parameters);
  return static_cast<size_t>(std::count_if(names.begin(), names.end(), [&](const auto& name) {
    return FindRule(*rules_, name, layers).has_value();
  }));
}

std::optional<std::string> Family::Rename(std::string_view parameter, Naming to, uint32_t layers,
                                          bool tied) const {
  if (to == Naming::kAsSource) return std::string(parameter);
  const auto known = layers == 0 ? std::optional<uint32_t>() : std::optional<uint32_t>(layers);
  const bool to_pipe = to == Naming::kPipe;
  for (const RenameRule& rename : rules_->renames) {
    // A pipeline's name tells by itself whether it is tied.
    if (to_pipe && rename.tied && *rename.tied != tied) continue;
    const auto holes = (to_pipe ? rename.plain : rename.pipe).Match(parameter, known);
    if (!holes) continue;
    if (auto name = (to_pipe ? rename.pipe : rename.plain).Render(*holes, known)) return name;
  }
  for (const RenameRule& rename : rules_->renames) {
    if ((to_pipe ? rename.pipe : rename.plain).Match(parameter, known)) {
      return std::string(parameter);
    }
  }
  return std::nullopt;
}

Result<FamilySet> FamilySet::Shipped() {
  FamilySet set;
  for (const auto& [origin, text] : ShippedFamilies()) {
    CKPT_ASSIGN_OR_RETURN(Family family, Family::Parse(text, origin));
    set.families_.push_back(std::make_shared<const Family>(std::move(family)));
  }
  return set;
}

Status FamilySet::AddFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Fail(ErrorCode::kNotFound, StrCat("family file ", path, " cannot be opened"));
  std::string text(kMaxFile + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFile) return Fail(ErrorCode::kInvalid, StrCat(path, ": above 1 MiB"));
  CKPT_ASSIGN_OR_RETURN(Family family, Family::Parse(text, path));
  // After the user's earlier ones, before the shipped.
  families_.insert(families_.begin() + static_cast<std::ptrdiff_t>(added_),
                   std::make_shared<const Family>(std::move(family)));
  ++added_;
  return {};
}

const Family* FamilySet::Choose(std::span<const std::string> names) const {
  const Family* best = nullptr;
  size_t most = 0;
  for (const auto& family : families_) {
    const size_t covered = family->CountMatches(names);
    if (covered == 0 || covered <= most) continue;
    best = family.get();
    most = covered;
    if (covered == names.size()) break;
  }
  return best;
}

const Family* FamilySet::Find(std::string_view name) const {
  for (const auto& family : families_) {
    if (family->name() == name) return family.get();
  }
  return nullptr;
}

}  // namespace ckptfs
