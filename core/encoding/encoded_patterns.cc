// SPDX-License-Identifier: Apache-2.0

#include "core/encoding/encoded_patterns.h"

#include <map>
#include <numeric>
#include <utility>

namespace ckptfs {
namespace {

// The cut of a stored tensor; nothing if it would go through a block.
std::optional<Cut> StoredCut(const Cut& cut, const StoredDim& to) {
  if (to.block == 1) {
    Cut same = cut;
    same.dim = to.dim;
    return same;
  }
  if (cut.pad_multiple != 0 || !cut.widths.empty() || cut.unit == 0) return std::nullopt;
  const uint64_t divisor = to.counts_blocks ? to.block : 1;
  Cut out{.dim = to.dim};
  for (const uint64_t part : cut.parts) {
    if (cut.parts.size() > 1 && part % to.block != 0) return std::nullopt;
    out.parts.push_back((part + divisor - 1) / divisor);
  }
  uint64_t unit;
  const uint64_t times = to.block / std::gcd(cut.unit, to.block);
  if (__builtin_mul_overflow(cut.unit, times, &unit)) return std::nullopt;
  out.unit = unit / divisor;
  return out;
}

}  // namespace

DecodedRules::DecodedRules(const std::vector<std::string>& names, const std::vector<Shape>& shapes,
                           const FamilyVariables& sizes, const FamilySet& families) {
  const FamilyBelow found = families.ChooseBelow(names);
  if (found.covered == 0) return;
  std::vector<NamedLocals> locals;
  locals.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) locals.push_back({names[i], {shapes[i]}});
  auto variables = found.family->Derive(locals, sizes);
  if (!variables) return;  // sizes of another family's
  family_ = found.family;
  below_ = found.below;
  variables_ = *std::move(variables);
}

std::optional<RuleMatch> DecodedRules::Of(const std::string& name) const {
  if (family_ == nullptr) return std::nullopt;
  auto match = family_->Match(name, variables_, below_);
  return match ? *std::move(match) : std::nullopt;
}

Pattern StoredPattern(const Pattern& decoded, const std::vector<StoredDim>& dims) {
  Pattern out = decoded;
  for (Cut& cut : out.cuts) {
    if (cut.dim >= dims.size()) return {};
    auto stored = StoredCut(cut, dims[cut.dim]);
    if (!stored) return {};
    cut = *std::move(stored);
  }
  return out;
}

void SetOpenPattern(const RuleMatch& match, Parameter& parameter) {
  if (parameter.pattern.kind != PatternKind::kUnknown) return;
  parameter.pattern = match.pattern;
  parameter.stacked_experts = match.stacked_experts;
}

std::vector<StoredDim> DimsOfValues(const EncodingConfig& config, size_t rank) {
  if (config.method == EncodingMethod::kMxfp4) {
    return {{0, 1, false}, {2, config.block.columns, true}, {1, config.block.rows, false}};
  }
  std::vector<StoredDim> dims;
  for (uint32_t d = 0; d < rank; ++d) dims.push_back({d, 1, false});
  dims[rank - 2].block = config.block.rows;
  dims[rank - 1].block = config.block.columns;
  return dims;
}

std::vector<StoredDim> DimsOfScales(const EncodingConfig& config, size_t rank) {
  std::vector<StoredDim> dims = DimsOfValues(config, rank);
  for (StoredDim& dim : dims) dim.counts_blocks = true;
  return dims;
}

Result<StepModel> CutBetweenBlocks(const StepModel& step, const EncodingConfig& config,
                                   const FamilyVariables& sizes, const FamilySet& families) {
  CKPT_ASSIGN_OR_RETURN(const auto weights, FindEncodedWeights(step, config));
  StepModel out = step;
  std::map<uint32_t, const EncodedWeight*> encoded;  // by either parameter
  for (const EncodedWeight& weight : weights) {
    encoded.emplace(static_cast<uint32_t>(weight.values), &weight);
    encoded.emplace(static_cast<uint32_t>(weight.scales), &weight);
  }
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const auto found = encoded.find(i);
    const bool scales = found != encoded.end() && found->second->values != ParameterIndex{i};
    if (scales) continue;
    names.push_back(found == encoded.end() ? step.parameters[i].name : found->second->name);
    shapes.push_back(found == encoded.end() ? step.parameters[i].shape : found->second->shape);
  }
  const DecodedRules rules(names, shapes, sizes, families);
  for (uint32_t i = 0; i < out.parameters.size(); ++i) {
    Parameter& parameter = out.parameters[i];
    const auto found = encoded.find(i);
    const EncodedWeight* weight = found == encoded.end() ? nullptr : found->second;
    const auto match = rules.Of(weight != nullptr ? weight->name : parameter.name);
    if (!match) continue;
    if (weight == nullptr) {
      SetOpenPattern(*match, parameter);
      continue;
    }
    const size_t rank = weight->shape.size();
    const bool values = weight->values == ParameterIndex{i};
    parameter.pattern = StoredPattern(
        match->pattern, values ? DimsOfValues(config, rank) : DimsOfScales(config, rank));
    parameter.source_pattern.reset();
    parameter.stacked_experts = match->stacked_experts;
    parameter.stage = match->stage;
    parameter.layer = match->layer.value_or(0);
    const Parameter& of_values = step.parameter(weight->values);
    parameter.expert = of_values.expert;
    parameter.expert_at = of_values.expert_at;
  }
  out.BuildIndex();
  return out;
}

}  // namespace ckptfs
