// SPDX-License-Identifier: Apache-2.0
//
// First stage of reading a native checkpoint,
//
//   TagFiles -> Parsed -> Named -> StateDict -> StepModel
//     register   Parse     Name      Place      Settle
//
// Parsed is what the files hold, of each only what is needed, and the degrees that
// they say.  All of them are of one run, and no rank's file is missing.
//
// Each stage is a function of the values before it, which it does not change; the
// later values refer to the earlier by address.
//
// Thread safety: immutable; Parse reads on TBB's threads.

#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "core/base/result.h"
#include "formats/deepspeed/model_states.h"
#include "formats/deepspeed/names.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/deepspeed/tag_files.h"

namespace ckptfs::deepspeed::native {

struct Parsed {
  std::map<RankKey, ModelStates> models;  // stages 0-2: of dp rank 0 only
  std::map<RankKey, OptimizerStates> optimizers;
  std::map<LayerKey, TensorDict> layers;
  std::map<ExpertKey, TensorDict> experts;
  uint32_t tp = 1;
  uint32_t pp = 1;
  uint32_t dp = 1;
  uint32_t ep = 1;
  int stage = 0;  // of ZeRO

  // A model-parallel rank is pipeline stage x tp + tensor-parallel rank.
  uint32_t model_ranks() const { return tp * pp; }
  const ModelStates& model(uint32_t mp) const { return models.at(RankKey{mp, 0}); }
  // Over how many expert-parallel ranks a flat group of native experts is spread;
  // nothing of a group that all data-parallel ranks share.
  std::optional<uint32_t> ExpertRanks(uint32_t mp, size_t group) const;
};

// Errors: kInvalid names the file and the key or the rule: files that are missing,
// of two runs, or of ranks beyond the degrees; kUnsupported AutoEP under ZeRO.
// BLOCKS: on reading every file's header.
Result<Parsed> Parse(const TagFiles& files);

}  // namespace ckptfs::deepspeed::native
