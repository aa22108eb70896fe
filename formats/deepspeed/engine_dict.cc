// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/engine_dict.h"

#include <algorithm>

#include "core/base/strings.h"
#include "core/view/shard.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/tools/source_traits.h"

namespace ckptfs::deepspeed {
namespace {

// Shown for steps of other frameworks; stage 1 refuses versions below 0.3.17.
constexpr std::string_view kReadAsVersion = "0.19.7";

// The one of the source rank if ranks differ, else the global one.
const Document* ScopedDocument(const StepModel& step, std::string_view key, uint32_t source_rank) {
  const Document* scoped = step.FindDocument(key, StrCat("mp", source_rank));
  return scoped != nullptr ? scoped : step.FindDocument(key);
}

// A part of it is as large as a model: every rank's engine would load all of it.
bool HasAtoms(const Document& document) {
  return std::ranges::any_of(document.tensors,
                             [](const StoredTensor& t) { return t.atom.has_value(); });
}

// Every client key in the order of the source.
std::vector<std::string> ClientKeys(const StepModel& step) {
  std::vector<std::string> keys;
  std::set<std::string_view> seen;
  for (const Document& document : step.documents) {
    if (!document.key.starts_with(kClientPrefix) || HasAtoms(document)) continue;
    const std::string_view key = std::string_view(document.key).substr(kClientPrefix.size());
    if (seen.insert(key).second) keys.emplace_back(key);
  }
  return keys;
}

void SetDegrees(const Layout& layout, ArchiveBuilder& archive, DictBuilder& dict) {
  dict.Set(kDpWorldSize, uint64_t{layout.dp});
  dict.Set(kMpWorldSize, uint64_t{layout.tp} * layout.pp);
  DictBuilder degrees(archive);
  degrees.Set("pp_degree", uint64_t{layout.pp});
  degrees.Set("tp_degree", uint64_t{layout.tp});
  dict.Set(kParallelDimensions, std::move(degrees).Finish());
}

}  // namespace

void DictBuilder::Set(std::string_view key, NodeId value) {
  if (!seen_.emplace(key).second) return;
  items_.emplace_back(archive_.pickle().String(key), value);
}

void DictBuilder::Set(std::string_view key, uint64_t value) {
  Set(key, archive_.pickle().Int(static_cast<int64_t>(value)));
}

Status DictBuilder::SetDocument(std::string_view key, const Document* document) {
  if (document == nullptr || Has(key)) return {};
  CKPT_ASSIGN_OR_RETURN(const NodeId value, archive_.Value(*document));
  Set(key, value);
  return {};
}

uint32_t SourceRankOf(const StepModel& step, uint32_t rank, uint32_t ranks) {
  const bool differ = std::any_of(step.documents.begin(), step.documents.end(),
                                  [](const Document& d) { return d.scope.starts_with("mp"); });
  const uint64_t source_files = uint64_t{step.layout.tp} * step.layout.pp;
  return differ ? static_cast<uint32_t>(rank * source_files / ranks) : 0;
}

Result<NodeId> LocalWeight(const ShownState& shown, const Layout& layout, const RankCoordinate& at,
                           ParameterIndex parameter, ArchiveBuilder& archive) {
  const StepModel& step = shown.step();
  CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown.WeightOf(parameter));
  CKPT_ASSIGN_OR_RETURN(auto local, LocalOf(step, layout, at, step.parameter(parameter)));
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(local->shape, weight.dtype));
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(local->shape));
  const Shape shape = local->shape;
  const AtomSegment segment{weight.atom, std::move(local), 0, elements, weight.dtype};
  return archive.Tensor(weight.dtype, shape, {{bytes, segment}});
}

Status SetEngineState(const ShownState& shown, uint32_t source_rank, NodeId info,
                      ArchiveBuilder& archive, DictBuilder& dict) {
  const StepModel& step = shown.step();
  SetDegrees(shown.layout(), archive, dict);
  for (std::string_view key : kModelStateKeys) {
    CKPT_RETURN_IF_ERROR(dict.SetDocument(key, ScopedDocument(step, key, source_rank)));
  }
  CKPT_RETURN_IF_ERROR(SetVersion(step, archive, dict));
  dict.Set(kGlobalSteps, step.iteration);
  dict.Set(kSkippedSteps, uint64_t{0});
  dict.Set(kLrScheduler, archive.pickle().None());
  for (const std::string& key : ClientKeys(step)) {
    if (key == "universal_checkpoint_info") continue;
    const Document* value = ScopedDocument(step, StrCat(kClientPrefix, key), source_rank);
    CKPT_RETURN_IF_ERROR(dict.SetDocument(key, value));
  }
  if (!TraitsOf(step).engine) dict.Set("iteration", step.iteration);
  dict.Set("universal_checkpoint_info", info);
  return {};
}

Status SetVersion(const StepModel& step, ArchiveBuilder& archive, DictBuilder& dict) {
  CKPT_RETURN_IF_ERROR(dict.SetDocument(kDsVersion, step.FindDocument(kDsVersion)));
  dict.Set(kDsVersion, archive.pickle().String(kReadAsVersion));
  return {};
}

bool ScalesAnew(const ShownState& shown) {
  const auto& asked = shown.layout().dtype;
  if (!asked) return false;
  const StepModel& step = shown.step();
  const auto trained = std::ranges::find_if(step.atoms, [&](const Atom& atom) {
    return atom.kind == "weight" && step.parameter(atom.parameter).role == Role::kTrainable;
  });
  if (trained == step.atoms.end()) return false;
  return (trained->dtype == DType::kF16) != (*asked == DType::kF16);
}

}  // namespace ckptfs::deepspeed
