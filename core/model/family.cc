// SPDX-License-Identifier: Apache-2.0
#include "core/model/family.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/family_rules.h"
#include "core/model/name_normaliser.h"

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

// True if the rule's condition holds or cannot be told.
bool Applies(const FamilyRule& rule, const FamilyVariables* variables) {
  if (rule.only_if_equal.size() != 2 || variables == nullptr) return true;
  const auto left = rule.only_if_equal[0].Evaluate(*variables);
  const auto right = rule.only_if_equal[1].Evaluate(*variables);
  return !left || !right || *left == *right;
}

// `variables` null: conditions are not asked.
std::optional<Found> FindDirect(const FamilyRules& family, std::string_view name,
                                std::optional<uint32_t> layers, const FamilyVariables* variables) {
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
std::optional<uint32_t> CountLayers(const FamilyRules& family, std::span<const std::string> names) {
  std::optional<uint32_t> layers;
  for (const std::string& name : names) {
    const auto found = FindRule(family, name, std::nullopt);
    if (found && found->holes.layer && *found->holes.layer < UINT32_MAX) {
      layers = std::max(layers.value_or(0), *found->holes.layer + 1);
    }
  }
  return layers;
}

// The names of `parameters` without what wrappers put into them.
template <class Names, class NameOf>
std::vector<std::string> Normalised(const Names& parameters, NameOf name_of) {
  std::vector<std::string> names;
  names.reserve(parameters.size());
  for (const auto& parameter : parameters) names.push_back(NormaliseName(name_of(parameter)));
  return names;
}

// The whole parameter's size along `dim`: the ranks' extents together where the
// parameter's own rule cuts there.
std::optional<int64_t> WholeSize(const FamilyRules& family, const std::string& name,
                                 const std::vector<Shape>& locals, uint32_t dim,
                                 std::optional<uint32_t> layers) {
  for (const Shape& local : locals) {
    if (dim >= local.size()) return std::nullopt;
  }
  if (locals.empty()) return std::nullopt;
  uint64_t size = locals[0][dim];
  if (locals.size() > 1) {
    const auto found = FindRule(family, name, layers);
    if (!found || found->rule->kind == PatternKind::kUnknown) return std::nullopt;
    for (const CutRule& cut : found->rule->cuts) {
      if (cut.dim != dim) continue;
      if (found->rule->cuts.size() > 1 || cut.pad_multiple) return std::nullopt;
      size = 0;
      for (const Shape& local : locals) {
        const auto sum = CheckedAdd(size, local[dim], "size");
        if (!sum) return std::nullopt;
        size = *sum;
      }
    }
  }
  if (size > INT64_MAX) return std::nullopt;
  return static_cast<int64_t>(size);
}

// "heads = 4, head_dim = 16", of what the expressions mention.
std::string ValuesOf(std::initializer_list<const Expression*> expressions,
                     const FamilyVariables& variables) {
  std::string text;
  std::vector<std::string> said;
  for (const Expression* expression : expressions) {
    for (std::string& name : expression->Missing({})) {
      if (std::find(said.begin(), said.end(), name) != said.end()) continue;
      text += StrCat(text.empty() ? "" : ", ", name, " = ", variables.at(name));
      said.push_back(std::move(name));
    }
  }
  return text;
}

// Nothing if no variable it needs is known yet.
Result<std::optional<int64_t>> Compute(const FamilyRules& family, const DeriveRule& derive,
                                       const FamilyVariables& variables) {
  if (!derive.value->Missing(variables).empty()) return std::optional<int64_t>();
  const auto value = derive.value->Evaluate(variables);
  if (value) return std::optional<int64_t>(*value);
  return Fail(ErrorCode::kInvalid, StrCat("family '", family.name, "': ", derive.variable, " = ",
                                          derive.value->text(), ": ", value.error().message, " (",
                                          ValuesOf({&*derive.value}, variables), ")"));
}

Status Check(const FamilyRules& family, const CheckRule& check, const FamilyVariables& variables) {
  if (!check.left.Missing(variables).empty() || !check.right.Missing(variables).empty()) return {};
  const auto left = check.left.Evaluate(variables);
  const auto right = check.right.Evaluate(variables);
  if (left && right && *left == *right) return {};
  return Fail(ErrorCode::kInvalid, StrCat("family '", family.name, "': ", check.left.text(),
                                          " is not ", check.right.text(), " (",
                                          ValuesOf({&check.left, &check.right}, variables), ")"));
}

// Evaluates sizes of one rule; remembers which variables are missing.
class Sizes {
 public:
  explicit Sizes(const FamilyVariables& variables) : variables_(variables) {}

  Result<uint64_t> Of(const Expression& expression) {
    for (const std::string& name : expression.Missing(variables_)) Remember(missing_, name);
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
  // 0 if a variable is missing, which then is remembered.
  Result<uint64_t> OfUnit(const std::optional<Expression>& expression) {
    if (!expression) return 1;
    const std::vector<std::string> missing = expression->Missing(variables_);
    for (const std::string& name : missing) Remember(unit_missing_, name);
    if (!missing.empty()) return 0;
    CKPT_ASSIGN_OR_RETURN(const auto value, IfKnown(expression));
    return std::max<uint64_t>(value.value_or(1), 1);
  }
  bool OnlyUnits() const { return missing_.empty() && !unit_missing_.empty(); }
  std::string Missing() const {
    std::vector<std::string> all = missing_;
    for (const std::string& name : unit_missing_) Remember(all, name);
    std::string text;
    for (const std::string& name : all) text += StrCat(text.empty() ? "" : ", ", name);
    return text;
  }

 private:
  static void Remember(std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }

  const FamilyVariables& variables_;
  std::vector<std::string> missing_;
  std::vector<std::string> unit_missing_;
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
  CKPT_ASSIGN_OR_RETURN(cut.unit, sizes.OfUnit(rule.unit));
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

// Where the component at `at` of the normalised name stands in the name as it is spelled.
uint32_t WhereSpelled(std::string_view spelled, std::string_view normalised, size_t at) {
  const std::string_view tail = normalised.substr(at);
  for (size_t start = spelled.size(); start-- > 0;) {
    const bool begins = start == 0 || spelled[start - 1] == '.';
    if (!begins || spelled.size() - start < tail.size() || spelled[start] != tail[0]) continue;
    if (NormaliseName(spelled.substr(start)) == tail) return static_cast<uint32_t>(start);
  }
  return static_cast<uint32_t>(at);  // nothing was stripped
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
const std::string& Family::text() const { return rules_->text; }

Result<FamilyVariables> Family::Derive(std::span<const NamedLocals> parameters,
                                       const FamilyVariables& given) const {
  const auto names = Normalised(parameters, [](const NamedLocals& p) { return p.first; });
  FamilyVariables variables = given;
  if (!variables.contains("layers")) {
    if (const auto layers = CountLayers(*rules_, names)) variables["layers"] = *layers;
  }
  const auto layers = LayersOf(variables);
  for (const DeriveRule& derive : rules_->derives) {
    if (variables.contains(derive.variable)) continue;
    if (derive.value) {
      CKPT_ASSIGN_OR_RETURN(const auto value, Compute(*rules_, derive, variables));
      if (value) variables[derive.variable] = *value;
      continue;
    }
    for (size_t i = 0; i < names.size(); ++i) {
      bool matches = derive.parameter->Match(names[i], layers).has_value();
      for (const Spelling& spelling : PlainSpellings(*rules_, names[i], layers)) {
        matches = matches || derive.parameter->Match(spelling.plain, layers).has_value();
      }
      if (!matches) continue;
      const auto size = WholeSize(*rules_, names[i], parameters[i].second, derive.dim, layers);
      if (!size) continue;
      variables[derive.variable] = *size;
      break;
    }
  }
  variables.insert(rules_->defaults.begin(), rules_->defaults.end());  // keeps what is there
  for (const CheckRule& check : rules_->checks) {
    CKPT_RETURN_IF_ERROR(Check(*rules_, check, variables));
  }
  return variables;
}

FamilyVariables Family::Mentioned(const FamilyVariables& variables) const {
  FamilyVariables out;
  const auto take = [&](const Expression& expression) {
    for (const std::string& name : expression.Missing({})) {
      const auto found = variables.find(name);
      if (found != variables.end()) out.insert(*found);
    }
  };
  for (const FamilyRule& rule : rules_->rules) {
    for (const CutRule& cut : rule.cuts) {
      for (const Expression& part : cut.parts) take(part);
      for (const auto* size : {&cut.unit, &cut.pad_multiple, &cut.rows}) {
        if (*size) take(**size);
      }
    }
    for (const Expression& along : rule.grid) take(along);
    for (const Expression& side : rule.only_if_equal) take(side);
    if (rule.stacked_experts) take(*rule.stacked_experts);
  }
  if (const auto layers = variables.find("layers"); layers != variables.end()) out.insert(*layers);
  return out;
}

std::string NameBelow(std::string_view name, std::string_view below) {
  std::string out = NormaliseName(name);
  if (!below.empty() && out.starts_with(below) && out.size() > below.size())
    out.erase(0, below.size());
  return out;
}

Result<std::optional<RuleMatch>> Family::Match(std::string_view name, const FamilyVariables& given,
                                               std::string_view below) const {
  const std::string parameter = NameBelow(name, below);
  FamilyVariables with_defaults;
  const FamilyVariables* variables = &given;
  for (const auto& [variable, value] : rules_->defaults) {
    if (given.contains(variable)) continue;
    if (variables == &given) {
      with_defaults = given;
      variables = &with_defaults;
    }
    with_defaults.emplace(variable, value);
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
  if (match.expert) match.expert_at = WhereSpelled(name, parameter, found->holes.expert_at);
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
  match.only_unit = sizes.OnlyUnits();
  if (match.missing.empty() || match.only_unit) match.pattern = *std::move(pattern);
  return std::optional<RuleMatch>(std::move(match));
}

size_t Family::CountMatches(std::span<const std::string> spelled) const {
  const auto names = Normalised(spelled, [](const std::string& name) { return name; });
  const auto layers = CountLayers(*rules_, names);
  return static_cast<size_t>(std::count_if(names.begin(), names.end(), [&](const auto& name) {
    return FindRule(*rules_, name, layers).has_value();
  }));
}

std::optional<std::string> Family::Rename(std::string_view spelled, Naming to, uint32_t layers,
                                          bool tied) const {
  if (to == Naming::kAsSource) return std::string(spelled);
  const std::string parameter = NormaliseName(spelled);
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
      return parameter;
    }
  }
  return std::nullopt;
}

void FamilySet::Add(Family family) {
  families_.push_back(std::make_shared<const Family>(std::move(family)));
}

Result<std::string> FamilySet::AddFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Fail(ErrorCode::kNotFound, StrCat("family file ", path, " cannot be opened"));
  std::string text(kMaxFile + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFile) return Fail(ErrorCode::kInvalid, StrCat(path, ": above 1 MiB"));
  CKPT_ASSIGN_OR_RETURN(Family family, Family::Parse(text, path));
  const std::string name = family.name();
  families_.insert(families_.begin() + static_cast<std::ptrdiff_t>(added_),
                   std::make_shared<const Family>(std::move(family)));
  ++added_;
  return name;
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

namespace {

// The component that most names begin with; "" if none has a dot.
std::string CommonHead(const std::vector<std::string>& names) {
  std::map<std::string, size_t> heads;
  for (const std::string& name : names) {
    if (name.find('.') != std::string::npos) ++heads[name.substr(0, name.find('.') + 1)];
  }
  const auto head = std::max_element(
      heads.begin(), heads.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return head == heads.end() ? "" : head->first;
}

}  // namespace

FamilyBelow FamilySet::ChooseBelow(std::span<const std::string> names, const Family* forced) const {
  constexpr int kMaxBelow = 2;
  FamilyBelow best;
  std::string below;
  std::vector<std::string> shorter(names.begin(), names.end());
  for (int depth = 0;; ++depth) {
    const Family* family = forced != nullptr ? forced : Choose(shorter);
    const size_t covered = family == nullptr ? 0 : family->CountMatches(shorter);
    if (covered > best.covered || best.family == nullptr) best = {family, below, covered};
    if (covered == names.size() || depth == kMaxBelow) return best;
    for (std::string& name : shorter) name = NormaliseName(name);
    const std::string head = CommonHead(shorter);
    if (head.empty()) return best;
    below += head;
    for (size_t i = 0; i < shorter.size(); ++i) shorter[i] = NameBelow(names[i], below);
  }
}

const Family* FamilySet::Find(std::string_view name) const {
  for (const auto& family : families_) {
    if (family->name() == name) return family.get();
  }
  return nullptr;
}

}  // namespace ckptfs
