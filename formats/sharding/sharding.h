// SPDX-License-Identifier: Apache-2.0
//
// ShardingRules decides for each parameter of a source how its tensor-parallel
// ranks' tensors make up the whole one.  In this order: the checkpoint's own
// lists (universal_checkpoint_info), the user's --replicated and --averaged,
// the family's rules, and the lists' default (a cut along dim 0).  Nothing is
// ever inferred from bytes; a parameter that no rule covers is left undecided.
// Where nobody knows the unit of a cut (a head's rows), it is what the source
// itself kept whole: no view cuts finer.
//
// Thread safety: immutable once made.
// Lifetime: `info` and the families must outlive it.
// Units: elements.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/family.h"
#include "core/model/pattern.h"
#include "core/state/atom_parts.h"
#include "core/state/family_variables.h"
#include "core/state/source.h"
#include "formats/sharding/sharding_info.h"

namespace ckptfs {

// The spread of a parameter, and how it is cut for any degree.
struct Sharding : Spread {
  Pattern pattern;                        // for any degree; kUnknown: nothing says how
  std::optional<Pattern> source_pattern;  // Parameter::source_pattern
  Shape shape;                            // of the whole parameter, without padding
  StageRule stage = StageRule::kEvery;
  std::optional<uint32_t> layer;
  std::optional<uint32_t> expert;
  uint32_t expert_at = 0;  // where it stands in the name
  uint32_t stacked_experts = 0;
};

class ShardingRules {
 public:
  // `info` may be null; `parameters` are the names and the shapes that the
  // tensor-parallel ranks hold.  Sizes that contradict these are not used (the
  // user's are refused).  kNotFound: a forced family that nobody knows, kInvalid
  // one that covers no name.
  static Result<ShardingRules> Make(const ShardingInfo* info, const SourceOptions& options,
                                    std::vector<NamedLocals> parameters, const ModelSizes& sizes);

  // `locals`: the shapes that the tensor-parallel ranks hold, in rank order.
  // Nothing if no rule covers the name and there are several ranks.  kInvalid
  // if a rule contradicts the shapes.
  // The lists' default speaks of parameters only, never of a `buffer`.
  Result<std::optional<Sharding>> Resolve(std::string_view name, std::span<const Shape> locals,
                                          bool buffer) const;

  // Why Resolve gave nothing for the name: "no rule covers it", or the sizes that
  // its rule lacks.
  std::string WhyOpen(std::string_view name) const;
  // The family, what it needed, the number of layers, and what is to be said once
  // per step.
  void Describe(StepModel& header) const;

 private:
  struct Decision;
  Status ChooseFamily(const SourceOptions& options, std::span<const std::string> names);
  Status DeriveSizes(std::span<const NamedLocals> parameters, const ModelSizes& sizes);
  Status DecideByInfo(std::string_view name, std::span<const Shape> locals, Decision& out) const;
  Result<std::optional<RuleMatch>> MatchFamily(std::string_view name, size_t ranks) const;
  void Note(std::string text) const;
  Result<std::optional<Decision>> Decide(std::string_view name, std::span<const Shape> locals,
                                         const std::optional<RuleMatch>& family,
                                         bool by_default) const;
  Result<std::optional<Decision>> DecideByFamily(std::string_view name, const RuleMatch& family,
                                                 bool by_default) const;
  Status ResolveWhole(std::string_view name, const Decision* decision, Sharding& out) const;
  static Status ResolveShards(std::string_view name, std::span<const Shape> locals,
                              Decision decision, Sharding& out);
  static Status ResolveAffine(std::string_view name, std::span<const Shape> locals,
                              const AffineParameter& affine, Sharding& out);

  const ShardingInfo* info_ = nullptr;
  const Family* family_ = nullptr;
  std::string below_;  // the module that the family's model lies in: "net."
  FamilyVariables variables_;
  std::vector<NamePattern> replicated_;
  std::vector<NamePattern> averaged_;
  mutable std::vector<std::string> notes_;
};

// Whole and equal on each of `ranks` tensor-parallel ranks.
Sharding ReplicatedSharding(const Shape& shape, uint32_t ranks);

// The part of rank `rank` when each of the consecutive parts of dim `dim` is cut
// into pieces of widths[part][rank].  Rows beyond the atom's are padding.
LocalTensor LocalOfWidths(const Shape& atom, uint32_t dim,
                          const std::vector<std::vector<uint64_t>>& widths, uint32_t rank);

}  // namespace ckptfs
