// SPDX-License-Identifier: Apache-2.0
//
// These functions say how ranks cut weights that are stored with scales per block: as the family
// cuts the decoded tensor, and nowhere inside of a block.  Values and scales are cut alike.
//
// Thread safety: pure functions.
// Lifetime: refers to the families, which must outlive it.
// Units: elements; blocks where said.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/encoding/encoded_weights.h"
#include "core/model/family.h"

namespace ckptfs {

// The rules of the family whose names most of the decoded tensors have.
class DecodedRules {
 public:
  // `names`, `shapes`: of the decoded step's parameters; `sizes`: what is known of the model.
  DecodedRules(const std::vector<std::string>& names, const std::vector<Shape>& shapes,
               const FamilyVariables& sizes, const FamilySet& families);

  // Nothing where no rule covers the name.
  std::optional<RuleMatch> Of(const std::string& name) const;

 private:
  const Family* family_ = nullptr;
  std::string below_;
  FamilyVariables variables_;
};

// A dimension of the decoded tensor in a stored one.
struct StoredDim {
  uint32_t dim = 0;
  uint64_t block = 1;  // elements that are one index there, or that share a scale
  bool counts_blocks = false;
};

// The pattern of a stored tensor, where its dimensions lie as `dims` says by the decoded one's
// dimension.  kUnknown where a part is not of whole blocks.
Pattern StoredPattern(const Pattern& decoded, const std::vector<StoredDim>& dims);

// The rule gives this of a parameter for which none did: sizes that only decoded tensors tell (the
// number of experts) were not known.
void SetOpenPattern(const RuleMatch& match, Parameter& parameter);

// The dimensions of values and of scales, for a decoded tensor of so many dimensions.
std::vector<StoredDim> DimsOfValues(const EncodingConfig& config, size_t rank);
std::vector<StoredDim> DimsOfScales(const EncodingConfig& config, size_t rank);

// The step with patterns that cut encoded weights between blocks, and others by their family.
Result<StepModel> CutBetweenBlocks(const StepModel& step, const EncodingConfig& config,
                                   const FamilyVariables& sizes, const FamilySet& families);

}  // namespace ckptfs
