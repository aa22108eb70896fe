// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/translations.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/dialects/shipped.h"
#include "formats/families/shipped.h"
#include "formats/tools/config_text.h"
#include "formats/torch/source_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kQuantised =
    "its weights are quantised, and their scales have names of their own";

// States that are values of a document stay with a parameter's name.
Status CheckOtherStates(const StepModel& step, const StepModel& translated) {
  const Document* document = step.FindDocument(kSourceStates);
  if (document == nullptr) return {};
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  for (const auto& [label, parameters] : RootOf(tree).Items()) {
    for (const auto& [name, kinds] : parameters.Items()) {
      if (!name.String() || translated.FindParameter(*name.String())) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "the optimizer has a state of it that is neither a tensor of its shape nor "
                        "a number, which cannot follow it to other names"}
                      .OfParameter(*name.String()));
    }
  }
  return {};
}

// The families' names of sizes that config.json and the step's own facts must have alike.
constexpr std::string_view kSame[] = {"heads", "kv_heads", "head_dim"};
// The families whose sizes are the job's own arguments', and that shapes have proved.
constexpr std::string_view kArgumentsFamilies[] = {"megatron_core", "megatron_core_mla"};

bool HasArguments(const StepModel& step) {
  return std::ranges::find(kArgumentsFamilies, step.family) != std::end(kArgumentsFamilies);
}

// Names a way in which the job computed otherwise than the files' readers do, though its tensors
// have the same shapes; "" where it did not.
std::string_view OtherWay(const StepModel& step) {
  const Document* document = step.FindDocument("client/args");
  if (document == nullptr) return "";
  const auto tree = ParseDocument(*document);
  if (!tree) return "its arguments cannot be read";
  const PickleRef args = RootOf(*tree);
  if (args["apply_layernorm_1p"].Bool().value_or(false)) {
    return "its norms are stored minus one (apply_layernorm_1p)";
  }
  if (args["rotary_interleaved"].Bool().value_or(false)) {
    return "the halves of its heads are interleaved (rotary_interleaved)";
  }
  return "";
}

// Adds the sizes that the step was adopted with, where its family reads them off shapes and
// arguments; its vocabulary is the padded one, which is not a model's own.
void AddOwnSizes(const StepModel& step, ModelKind& kind) {
  for (const std::string_view name : kSame) {
    const auto own = step.family_sizes.find(std::string(name));
    if (own == step.family_sizes.end()) continue;
    const auto [known, fresh] = kind.sizes.emplace(name, own->second);
    if (fresh || known->second == own->second || !HasArguments(step)) continue;
    kind.conflict = StrCat("config.json says ", name, " ", known->second,
                           ", but the step's arguments and shapes ", own->second);
  }
}

}  // namespace

Translations::Translations(std::optional<ModelFiles> given, std::vector<Table> tables,
                           FamilySet families)
    : given_(std::move(given)),
      tables_(std::move(tables)),
      families_(std::move(families)),
      said_(kSaidBytes,
            [](const SaidPtr& said) { return sizeof(*said) + HeapBytesOf(said->evidence.plan); }),
      kept_(kKeptBytes,
            [](const MadePtr& made) { return HeapBytesOf(*made->step) + HeapBytesOf(*made->of); }) {
}

Result<std::shared_ptr<Translations>> Translations::Make(std::optional<ModelFiles> given) {
  std::vector<Table> tables;
  for (const Dialect dialect : {Dialect::kHf5, Dialect::kMcore, Dialect::kTitan}) {
    CKPT_ASSIGN_OR_RETURN(DialectTable table, ShippedDialect(dialect));
    tables.push_back({dialect, std::move(table)});
  }
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  return std::shared_ptr<Translations>(
      new Translations(std::move(given), std::move(tables), std::move(families)));
}

DialectEvidence Translations::Look(const StepModel& step, Dialect table) const {
  const auto found = std::ranges::find(tables_, table, &Table::dialect);
  CKPT_CHECK(found != tables_.end());
  return FindDialect(step, found->table, table, ConfigOf(step).kind);
}

// A config that says nothing of the kind counts as none.
Translations::Config Translations::ConfigOf(const StepModel& step) const {
  Config out;
  const std::string* config = ChosenModelFiles(step.facts, given_).config();
  if (config == nullptr) return out;
  if (const auto sizes = ParseModelConfig(*config)) {
    out.kind.sizes = *sizes;
    const auto experts = sizes->find("experts");
    if (experts != sizes->end()) out.kind.experts = static_cast<uint64_t>(experts->second);
  }
  if (const auto facts = ReadConfigFacts(*config)) {
    out.kind.model_type = facts->model_type;
    out.quantised = !facts->quantisation.empty();
    constexpr uint64_t kMaxRows = uint64_t{1} << 31;
    if (facts->vocabulary && *facts->vocabulary < kMaxRows) {
      out.kind.sizes["vocab"] = static_cast<int64_t>(*facts->vocabulary);
    }
  }
  AddOwnSizes(step, out.kind);
  if (HasArguments(step) && out.kind.conflict.empty()) {
    out.kind.conflict = OtherWay(step);
  }
  return out;
}

// A dialect whose names are there is the step's, or nothing is: the same model may have equal names
// in files and in modules of another library.
Translations::Said Translations::Find(const StepModel& step) const {
  const Config config = ConfigOf(step);
  std::optional<Said> files, first;
  if (config.quantised) first.emplace().evidence.why = kQuantised;
  for (size_t i = 0; i < tables_.size() && !config.quantised; ++i) {
    const auto& [dialect, table] = tables_[i];
    Said said;
    said.table = dialect;
    said.evidence = FindDialect(step, table, dialect, config.kind,
                                files ? LookedFor::kModules : LookedFor::kAll);
    DialectEvidence& found = said.evidence;
    if (dialect == Dialect::kHf5) found.foreign = false;
    if (found.dialect == dialect || found.foreign) return said;
    if (found.dialect == Dialect::kHf) {
      files = std::move(said);
    } else if (!first) {
      first = std::move(said);
    }
  }
  if (!files) return *std::move(first);
  files->evidence.same = first && first->table == Dialect::kHf5 && first->evidence.same;
  return *std::move(files);
}

Translations::SaidPtr Translations::SaidOf(const std::shared_ptr<const StepModel>& step) {
  const auto known = said_.Find(step.get());
  // Another step may have had the address before.
  if (known && (*known)->of.lock() == step) return *known;
  auto found = std::make_shared<Said>(Find(*step));
  found->of = step;
  said_.Replace(step.get(), found);
  return found;
}

FoundDialect Translations::Of(const std::shared_ptr<const StepModel>& step) {
  return SaidOf(step)->evidence;
}

Result<std::shared_ptr<const StepModel>> Translations::To(
    const std::shared_ptr<const StepModel>& step, Dialect to, Carried carried) {
  const SaidPtr said = SaidOf(step);
  const DialectEvidence& found = said->evidence;
  if (found.dialect == to) return step;
  if (found.same && (to == Dialect::kHf || to == Dialect::kHf5)) return step;
  const bool known = found.dialect != Dialect::kAsSource;
  if (known && found.dialect != Dialect::kHf && to != Dialect::kHf) {
    CKPT_ASSIGN_OR_RETURN(const auto files, To(step, Dialect::kHf, carried));
    return To(files, to, carried);
  }
  const auto make = [&]() -> Result<MadePtr> {
    const bool other = (found.dialect == Dialect::kHf || !known) && said->table != to &&
                       std::ranges::find(tables_, to, &Table::dialect) != tables_.end();
    const DialectEvidence own = other ? Look(*step, to) : DialectEvidence();
    const DialectEvidence& evidence = other ? own : found;
    if (own.same) return std::make_shared<const Made>(Made{step, step});
    CKPT_ASSIGN_OR_RETURN(
        auto made, Translate(*step, evidence, ConfigOf(*step).kind.sizes, families_, carried));
    if (carried == Carried::kAll) CKPT_RETURN_IF_ERROR(CheckOtherStates(*step, *made));
    return std::make_shared<const Made>(Made{step, std::move(made)});
  };
  CKPT_ASSIGN_OR_RETURN(const MadePtr made, kept_.Get(Key{step.get(), to, carried}, make));
  return made->step;
}

}  // namespace ckptfs
