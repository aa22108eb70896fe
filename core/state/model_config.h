// SPDX-License-Identifier: Apache-2.0
//
// A config.json as transformers writes it (save_pretrained, Trainer's
// checkpoint-N/), read for the few sizes that tell how attention is cut:
// heads, kv_heads, head_dim, hidden, experts.  If a model has several parts, the
// text part's (text_config) count where the top level has none.  The file may be
// anybody's: it is bounded and taken as numbers only, and callers compare them with
// the tensors' shapes.
//
// Thread safety: pure but for reading files.

#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/state/family_variables.h"
#include "core/state/source.h"

namespace ckptfs {

struct ModelConfig {
  std::string path;
  FamilyVariables sizes;  // under the families' own names
};

// kInvalid if the text is not JSON.  Numbers that are not sizes (0, negative,
// 2^31 and more, fractions, texts) are passed over.
Result<FamilyVariables> ParseModelConfig(std::string_view config);

// The config.json that says a size, in a directory of `root` or at most two
// directories above it, the nearest first: a tag, the save directory, a run's
// directory.  One that we may not read or that is not a file counts as none; a
// device that fails is an error.
Result<std::optional<ModelConfig>> FindModelConfig(const Root& root, const std::string& directory);

// All that is known of a step's sizes: `args` that the checkpoint holds, what the
// user gave, and a config.json beside its tag directory, or else the one that the user gave.
Result<ModelSizes> SizesOf(const FamilyVariables& args, const SourceOptions& options,
                           const StepCandidate& step);

}  // namespace ckptfs
