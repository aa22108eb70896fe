// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/translate.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/strings.h"
#include "core/dialect/name_plan.h"
#include "core/model/name_normaliser.h"

namespace ckptfs {
namespace {

// About 1 GB.
constexpr uint64_t kMaxPieces = 4'000'000;
constexpr uint64_t kPieceBytes = sizeof(Piece) + 3 * (sizeof(uint64_t) * 3 + 16);

tl::unexpected<Error> Cannot(std::string why, std::string_view parameter) {
  return Fail(Error{ErrorCode::kUnsupported, std::move(why)}.OfParameter(parameter));
}

uint64_t PiecesOf(const AtomSource& source) {
  uint64_t pieces = 0;
  for (const Gather& gather : source.gathers) {
    for (const LocalTensor& local : gather.locals) pieces += local.pieces.size();
  }
  return pieces;
}

bool IsWeight(const Atom& atom) { return atom.kind == "weight" || atom.kind == "master"; }

// Looks patterns up in the family that names most of the tensors that were made.
class Patterns {
 public:
  Patterns(const StepModel& step, const NamePlan& plan, const FamilyVariables& sizes,
           const FamilySet& families) {
    // One tensor of each class: all of a class match alike.
    std::set<std::pair<const MapRule*, uint32_t>> seen;
    std::vector<std::string> names;
    std::vector<NamedLocals> shapes;
    for (const RenamedTensor& tensor : plan.tensors) {
      if (tensor.rule == nullptr || !seen.emplace(tensor.rule, tensor.part).second) continue;
      names.push_back(tensor.name);
      shapes.push_back({tensor.name, {tensor.shape}});
    }
    // The step's own family knows its sizes; another that has the names may call others so.
    const Family* const own = families.Find(step.family);
    const bool all = own != nullptr && own->CountMatches(names) == names.size();
    const FamilyBelow found =
        all ? FamilyBelow{own, "", names.size()} : families.ChooseBelow(names);
    if (found.covered == 0) return;
    FamilyVariables known = step.family_sizes;
    known.insert(sizes.begin(), sizes.end());  // names that no family had told none
    auto variables = found.family->Derive(shapes, known);
    if (!variables) return;  // sizes of another family's
    family_ = found.family;
    below_ = found.below;
    variables_ = *std::move(variables);
  }

  // Sets what the tensor's name says; a pattern stays unknown where no rule covers it.
  void Set(const RenamedTensor& tensor, Parameter& parameter) {
    const RuleMatch* match = MatchOf(tensor);
    if (match == nullptr) return;
    parameter.pattern = match->pattern;
    parameter.stacked_experts = match->stacked_experts;
  }

 private:
  const RuleMatch* MatchOf(const RenamedTensor& tensor) {
    if (family_ == nullptr) return nullptr;
    const auto [found, fresh] =
        matches_.try_emplace(std::tuple(tensor.rule, tensor.part, tensor.shape));
    if (fresh) {
      auto match = family_->Match(tensor.name, variables_, below_);
      if (match) found->second = *std::move(match);
    }
    return found->second ? &*found->second : nullptr;
  }

  const Family* family_ = nullptr;
  std::string below_;
  FamilyVariables variables_;
  std::map<std::tuple<const MapRule*, uint32_t, Shape>, std::optional<RuleMatch>> matches_;
};

// Builds the translated step.
class Translator {
 public:
  Translator(const StepModel& from, const NamePlan& plan, const FamilyVariables& sizes,
             const FamilySet& families, Carried carried)
      : from_(from), plan_(plan), carried_(carried), patterns_(from, plan, sizes, families) {
    atoms_of_.resize(from.parameters.size());
    for (uint32_t a = 0; a < from.atoms.size(); ++a) {
      const bool state = !IsWeight(from.atoms[a]) && from.IsOfModel(from.atoms[a]);
      if (state && carried == Carried::kWeights) continue;
      atoms_of_[static_cast<uint32_t>(from.atoms[a].parameter)].push_back(a);
    }
  }

  Result<std::shared_ptr<const StepModel>> Make() && {
    CopyHeader();
    for (uint32_t t = 0; t < plan_.tensors.size(); ++t) CKPT_RETURN_IF_ERROR(AddParameter(t));
    for (uint32_t t = 0; t < plan_.tensors.size(); ++t) CKPT_RETURN_IF_ERROR(AddAtoms(t));
    CKPT_RETURN_IF_ERROR(AddAliases());
    if (carried_ == Carried::kAll) CKPT_RETURN_IF_ERROR(AddGroups());
    CKPT_RETURN_IF_ERROR(RenumberDocuments());
    to_.BuildIndex();
    return std::make_shared<const StepModel>(std::move(to_));
  }

 private:
  using Key = std::pair<std::string_view, std::string_view>;  // (optimizer, kind)
  static Key KeyOf(const Atom& atom) { return {atom.optimizer, atom.kind}; }

  // All that is neither a parameter nor follows one.
  void CopyHeader() {
    static_cast<StepHeader&>(to_) = from_;
    to_.layers = from_.LayerCount();
    to_.facts.safetensors.clear();  // they are true of the source's own names
    to_.documents = from_.documents;
  }

  Status AddParameter(uint32_t t) {
    const RenamedTensor& tensor = plan_.tensors[t];
    Parameter parameter = from_.parameter(tensor.parts.front());
    if (tensor.rule == nullptr) {
      to_.parameters.push_back(std::move(parameter));
      return {};
    }
    for (const ParameterIndex p : tensor.parts) {
      const Parameter& part = from_.parameter(p);
      if (part.role != parameter.role || part.stage != parameter.stage ||
          part.layer != parameter.layer) {
        return Cannot(StrCat("its parts differ in role or stage: '", parameter.name, "' and '",
                             part.name, "'"),
                      tensor.name);
      }
      if (part.source_stages != parameter.source_stages) parameter.source_stages.clear();
    }
    parameter.name = tensor.name;
    parameter.shape = tensor.shape;
    parameter.expert = tensor.expert;
    parameter.expert_at = tensor.expert ? ExpertAt(tensor) : 0;
    if (!tensor.maps.empty()) {
      parameter.pattern = {};
      parameter.source_pattern.reset();
      parameter.stacked_experts = 0;
      patterns_.Set(tensor, parameter);
    } else if (parameter.pattern.kind == PatternKind::kUnknown && parameter.role != Role::kBuffer) {
      patterns_.Set(tensor, parameter);  // no family knew the other name
    }
    to_.parameters.push_back(std::move(parameter));
    return {};
  }

  // Where the number stands in the name, behind what wrappers put before it.
  static uint32_t ExpertAt(const RenamedTensor& tensor) {
    const std::string normalised = NormaliseName(tensor.name);
    const size_t head = tensor.name.size() - normalised.size();
    for (const NameTemplate& name : tensor.rule->from) {
      const auto holes = name.Match(normalised, std::nullopt);
      if (holes && holes->expert) return static_cast<uint32_t>(head + holes->expert_at);
    }
    const auto holes = tensor.rule->to->Match(normalised, std::nullopt);
    return holes ? static_cast<uint32_t>(head + holes->expert_at) : 0;
  }

  Status AddAtoms(uint32_t t) {
    const RenamedTensor& tensor = plan_.tensors[t];
    return tensor.maps.empty() ? MoveAtoms(t, tensor) : ComposeAtoms(t, tensor);
  }

  // The parameter's atoms as they are.
  Status MoveAtoms(uint32_t t, const RenamedTensor& tensor) {
    const auto& old = atoms_of_[static_cast<uint32_t>(tensor.parts.front())];
    const auto first = static_cast<uint32_t>(to_.atoms.size());
    for (const uint32_t a : old) {
      moved_.emplace(a, static_cast<uint32_t>(to_.atoms.size()));
      to_.atoms.push_back(from_.atoms[a]);
      to_.atoms.back().parameter = ParameterIndex{t};
    }
    for (size_t i = first; i < to_.atoms.size(); ++i) {
      AtomSource& source = to_.atoms[i].source;
      const auto of = DerivedFrom(source);
      if (!of) continue;
      const auto found = moved_.find(static_cast<uint32_t>(*of));
      if (found == moved_.end()) return Cannot("it is a cast of another tensor's", tensor.name);
      source.of = AtomIndex{found->second};
    }
    return {};
  }

  // The atoms of all parts under each key that one of them has, in the first part's order.
  std::vector<std::pair<Key, std::vector<const Atom*>>> AtomsByKey(
      const RenamedTensor& tensor) const {
    std::vector<std::pair<Key, std::vector<const Atom*>>> keys;
    for (const ParameterIndex p : tensor.parts) {
      for (const uint32_t a : atoms_of_[static_cast<uint32_t>(p)]) {
        const Key key = KeyOf(from_.atoms[a]);
        auto found = std::ranges::find(keys, key, [](const auto& one) { return one.first; });
        if (found == keys.end()) found = keys.insert(found, {key, {}});
        found->second.push_back(&from_.atoms[a]);
      }
    }
    // Casts behind what they are casts of.
    std::ranges::stable_partition(
        keys, [](const auto& one) { return !DerivedFrom(one.second.front()->source); });
    return keys;
  }

  Status ComposeAtoms(uint32_t t, const RenamedTensor& tensor) {
    std::map<Key, AtomIndex> made;
    for (const auto& [key, parts] : AtomsByKey(tensor)) {
      auto atom = Compose(tensor, parts, made);
      if (!atom) {
        return Fail(std::move(atom).error().WithContext(key.second).OfParameter(tensor.name));
      }
      made.emplace(key, AtomIndex{static_cast<uint32_t>(to_.atoms.size())});
      atom->parameter = ParameterIndex{t};
      pieces_ += PiecesOf(atom->source);
      to_.atoms.push_back(*std::move(atom));
      if (pieces_ > kMaxPieces) {
        return Fail(
            Error{ErrorCode::kExhausted,
                  StrCat("under other names the step would have more than ", kMaxPieces, " pieces")}
                .Needing("save it from fewer ranks, or compact it first"));
      }
    }
    return {};
  }

  Result<Atom> Compose(const RenamedTensor& tensor, const std::vector<const Atom*>& parts,
                       const std::map<Key, AtomIndex>& made) const {
    const Atom& first = *parts.front();
    if (parts.size() != tensor.parts.size()) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("only ", parts.size(), " of its ", tensor.parts.size(), " parts have it"));
    }
    Atom atom;
    atom.optimizer = first.optimizer;
    atom.kind = first.kind;
    atom.dtype = first.dtype;
    atom.relation = first.relation;
    atom.derived = first.derived;
    for (const Atom* one : parts) {
      if (one->dtype != first.dtype || one->relation != first.relation) {
        return Fail(ErrorCode::kUnsupported, "its parts differ in dtype or in what they are");
      }
      atom.derived = atom.derived && one->derived;
    }
    if (first.relation == Relation::kScalar) {
      atom.shape = first.shape;
      CKPT_ASSIGN_OR_RETURN(atom.source, ComposeScalar(parts));
      return atom;
    }
    if (first.relation != Relation::kSame) {
      return Fail(ErrorCode::kUnsupported, "its shape is not its parameter's");
    }
    atom.shape = tensor.shape;
    std::optional<AtomIndex> master;
    if (const auto of = DerivedFrom(first.source)) {
      const auto found = made.find(KeyOf(from_.atom(*of)));
      if (found != made.end()) master = found->second;
    }
    CKPT_ASSIGN_OR_RETURN(atom.source, ComposeSource(parts, tensor.maps, tensor.shape, master));
    return atom;
  }

  // One value for all parts: that of the only one, or equal ones.
  static Result<AtomSource> ComposeScalar(const std::vector<const Atom*>& parts) {
    if (parts.size() == 1 && !DerivedFrom(parts.front()->source)) return parts.front()->source;
    if (parts.front()->source.kind != SourceKind::kInline) {
      return Fail(ErrorCode::kUnsupported, "nothing shows that its parts have equal values");
    }
    return ComposeSource(parts, {}, parts.front()->shape);
  }

  Status AddAliases() {
    for (size_t i = 0; i < from_.aliases.size(); ++i) {
      const Alias& alias = from_.aliases[i];
      const auto& tensors = plan_.of_parameter[static_cast<uint32_t>(alias.parameter)];
      if (tensors.size() != 1 || !plan_.tensors[tensors.front()].maps.empty()) {
        return Cannot("it is tied, and is not one tensor under other names", alias.name);
      }
      to_.aliases.push_back({plan_.aliases[i], ParameterIndex{tensors.front()}});
    }
    return {};
  }

  Status AddGroups() {
    std::map<std::pair<std::string_view, uint32_t>, const Group*> placed;  // (optimizer, tensor)
    std::map<std::pair<std::string_view, uint32_t>, size_t> parts;         // in groups
    for (const Group& group : from_.groups) {
      Group out = group;
      out.parameters.clear();
      for (const ParameterIndex p : group.parameters) {
        for (const uint32_t t : plan_.of_parameter[static_cast<uint32_t>(p)]) {
          const std::pair<std::string_view, uint32_t> key(group.optimizer, t);
          ++parts[key];
          const auto [other, fresh] = placed.emplace(key, &group);
          if (fresh) {
            out.parameters.push_back(ParameterIndex{t});
          } else if (other->second != &group &&
                     other->second->hyper_parameters != group.hyper_parameters) {
            return Cannot(StrCat("its parts, such as '", from_.parameter(p).name,
                                 "', are in groups of an optimizer with other hyper-parameters"),
                          plan_.tensors[t].name);
          }
        }
      }
      to_.groups.push_back(std::move(out));
    }
    for (const auto& [key, count] : parts) {
      const RenamedTensor& tensor = plan_.tensors[key.second];
      if (count == tensor.parts.size()) continue;
      return Cannot(StrCat("only ", count, " of its ", tensor.parts.size(),
                           " parts are in an optimizer's groups"),
                    tensor.name);
    }
    return {};
  }

  // Tensors that documents mention are atoms of no model.
  Status RenumberDocuments() {
    for (Document& document : to_.documents) {
      for (StoredTensor& tensor : document.tensors) {
        if (!tensor.atom) continue;
        const auto found = moved_.find(static_cast<uint32_t>(*tensor.atom));
        if (found == moved_.end()) {
          return Fail(ErrorCode::kUnsupported,
                      StrCat("document '", document.key, "' mentions a tensor of the model"));
        }
        tensor.atom = AtomIndex{found->second};
      }
    }
    return {};
  }

  const StepModel& from_;
  const NamePlan& plan_;
  const Carried carried_;
  Patterns patterns_;
  std::vector<std::vector<uint32_t>> atoms_of_;  // by parameter of `from_`
  std::map<uint32_t, uint32_t> moved_;           // atoms that are as they were
  uint64_t pieces_ = 0;
  StepModel to_;
};

// How many names are those of one side alone, and of neither.
struct SideCount {
  uint64_t files = 0, modules = 0, known = 0, nobodys = 0;
  std::string file, module;  // the first of each
  std::string stranger;      // a name that the table lacks, in a layer of which it has others
};

// "model.layers." of "model.layers.3.norm.weight"; "" of a name without a number.
std::string_view BeforeNumber(std::string_view name) {
  const size_t digit = name.find_first_of("0123456789");
  return digit == name.npos || digit == 0 || name[digit - 1] != '.' ? "" : name.substr(0, digit);
}

SideCount CountSides(const StepModel& step, std::span<const MapRule* const> rules) {
  SideCount count;
  std::set<std::string, std::less<>> layers;  // of known names
  std::vector<std::string> strangers;
  const auto add = [&](const std::string& name, bool buffer) {
    bool file = false, module = false;
    const std::string normalised = NormaliseName(name);
    for (const RuleSide& side : SidesOf(rules, normalised)) {
      (side.file ? file : module) = true;
    }
    if (file || module) {
      ++count.known;
      layers.emplace(BeforeNumber(normalised));
    } else {
      ++count.nobodys;
      if (!buffer) strangers.push_back(normalised);
    }
    if (file == module) return;
    if (++(file ? count.files : count.modules) == 1) (file ? count.file : count.module) = name;
  };
  for (const Parameter& parameter : step.parameters) {
    if (IsOfModel(parameter)) add(parameter.name, parameter.role == Role::kBuffer);
  }
  for (const Alias& alias : step.aliases) add(alias.name, false);
  layers.erase("");
  for (std::string& name : strangers) {
    if (!count.stranger.empty() || !layers.contains(BeforeNumber(name))) continue;
    count.stranger = std::move(name);
  }
  return count;
}

// The number of experts is the config's in every tensor that stacks them.
Status CheckExperts(const StepModel& step, const NamePlan& plan, bool from_files,
                    uint64_t experts) {
  for (const RenamedTensor& tensor : plan.tensors) {
    if (experts == 0 || tensor.rule == nullptr || tensor.rule->stack != Stack::kExpert) continue;
    const Shape& shape = from_files ? tensor.shape : step.parameter(tensor.parts.front()).shape;
    if (shape.empty() || shape.front() == experts) continue;
    return Fail(Error{ErrorCode::kInvalid,
                      StrCat("it has ", shape.front(), " experts, but config.json ", experts)}
                    .OfParameter(tensor.name));
  }
  return {};
}

}  // namespace

DialectEvidence FindDialect(const StepModel& step, const DialectTable& table, Dialect dialect,
                            const ModelKind& kind, LookedFor looked_for) {
  DialectEvidence out;
  if (kind.model_type.empty()) {
    out.why = "no config.json says which model it is";
    return out;
  }
  const auto rules = table.RulesOf(kind.model_type);
  if (rules.empty()) {
    out.same = table.Knows(kind.model_type);
    out.why = StrCat(
        "models of type '", kind.model_type, "' ",
        out.same ? "have the same names in files and in modules" : "are in no table of names");
    return out;
  }
  const SideCount count = CountSides(step, rules);
  // Another library may call its last norm alike: that name alone tells nothing.
  out.foreign = count.modules > count.nobodys;
  if ((count.files > 0) == (count.modules > 0)) {
    out.why =
        count.files == 0
            ? StrCat("no name is one that tells of models of type '", kind.model_type, "'")
            : StrCat("'", count.file, "' is a name of files, '", count.module, "' one of modules");
    return out;
  }
  const bool from_files = count.files > 0;
  if (table.whole() && count.known <= count.nobodys) {
    out.why = StrCat("'", from_files ? count.file : count.module, "' is a name of models of type '",
                     kind.model_type, "', but the table '", table.name(), "' has none for ",
                     count.nobodys, " other names of the step");
    return out;
  }
  if (table.whole() && !count.stranger.empty()) {
    out.why = StrCat("the table '", table.name(), "' has no name for '", count.stranger, "'");
    return out;
  }
  if (from_files && looked_for == LookedFor::kModules) return out;
  if (!kind.conflict.empty()) {
    out.why = kind.conflict;
    return out;
  }
  auto plan = MakeNamePlan(step, rules, kind.sizes, from_files);
  Status fits = plan ? CheckExperts(step, *plan, from_files, kind.experts) : Status();
  if (!plan || !fits) {
    out.why = (plan ? fits.error() : plan.error()).message;
    return out;
  }
  out.foreign = false;
  out.dialect = from_files ? Dialect::kHf : dialect;
  const uint64_t others = count.files + count.modules - 1;
  out.why =
      StrCat("config.json says '", kind.model_type, "', '", from_files ? count.file : count.module,
             "'", others == 0 ? " is a name" : StrCat(" and ", others, " more are names"),
             from_files ? " of files" : " of modules", ", and all shapes fit");
  out.plan = *std::move(plan);
  return out;
}

Result<std::shared_ptr<const StepModel>> Translate(const StepModel& step,
                                                   const DialectEvidence& evidence,
                                                   const FamilyVariables& sizes,
                                                   const FamilySet& families, Carried carried) {
  if (evidence.dialect == Dialect::kAsSource) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("nothing proves how its tensors are named: ", evidence.why));
  }
  return Translator(step, evidence.plan, sizes, families, carried).Make();
}

uint64_t HeapBytesOf(const StepModel& step) {
  uint64_t bytes = sizeof(step) + step.blobs.size() * sizeof(Blob);
  for (const Blob& blob : step.blobs) bytes += blob.path.size();
  for (const Document& document : step.documents) bytes += document.pickle.size();
  for (const Parameter& parameter : step.parameters) {
    bytes += sizeof(parameter) + 2 * parameter.name.size() + 64;
  }
  for (const Atom& atom : step.atoms) {
    bytes += sizeof(atom) + atom.kind.size() + 32;
    for (const Gather& gather : atom.source.gathers) {
      bytes += sizeof(gather) + gather.series.size() * sizeof(FragmentSeries);
      for (const LocalTensor& local : gather.locals) {
        bytes += sizeof(local) + 32 + local.pieces.size() * kPieceBytes;
      }
    }
  }
  return bytes;
}

}  // namespace ckptfs
