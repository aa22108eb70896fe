// SPDX-License-Identifier: Apache-2.0
//
// FamilyVariables are the sizes that family rules may mention (heads,
// head_dim, ...).  ModelSizes says what is known of them besides the shapes of
// tensors, by where it comes from; the nearest to the user wins.
//
// Thread safety: values and pure functions.

#pragma once

#include <string>

#include "core/model/family.h"

namespace ckptfs {

struct ModelSizes {
  FamilyVariables given;       // --family-set
  FamilyVariables recorded;    // by the training job, in the checkpoint itself (args)
  FamilyVariables configured;  // a config.json beside the checkpoint
  std::string config;          // its path, for messages; empty: there is none

  // The user's, else the checkpoint's, else the config's.
  FamilyVariables All() const;
};

// `numbers` under every common spelling too (heads, num_attention_heads, n_head,
// ...), where one of them is there.
FamilyVariables WithCommonSpellings(FamilyVariables numbers);

}  // namespace ckptfs
