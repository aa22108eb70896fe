// SPDX-License-Identifier: Apache-2.0
//
// These functions read the facts in a config.json of transformers that matter to its
// weights, and make the changes that a view may make to its text: the dtype, as
// save_pretrained writes it, the keys under which older releases look for what
// transformers 5 writes under new ones, and how weights are packed that are not any more.
//
// Thread safety: pure functions.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"

namespace ckptfs {

struct ConfigFacts {
  std::string model_type;
  std::string version;       // transformers_version
  std::string weights;       // transformers_weights: a file name of its own
  std::string quantisation;  // quant_method; "unknown" where it is not said
  // weight_block_size: rows and columns; zeros where it is not said, or activations have scales.
  std::array<uint64_t, 2> quantised_block = {};
  std::vector<std::string> architectures;
  std::optional<bool> tied;  // tie_word_embeddings
  // Sizes of the config itself, not of its parts, under any of transformers' names for them.
  std::optional<uint64_t> layers;
  uint64_t predictors = 0;  // layers behind those that predict tokens beyond the next
  std::optional<uint64_t> vocabulary;
  std::optional<uint64_t> hidden;
  std::set<std::string, std::less<>>
      nulls;  // keys of it and of its text_config whose value is null
};

// kInvalid unless the text is a JSON object.  A value that is not of the expected type
// counts as absent.
Result<ConfigFacts> ReadConfigFacts(std::string_view config);

// The `global_step` of a trainer_state.json; nothing of any other text.
std::optional<uint64_t> ReadTrainerStep(std::string_view state);

// The folders that sentence-transformers' modules.json lists ("path"), those of the
// model itself apart ("").  Empty for any other text.
std::vector<std::string> ReadModuleFolders(std::string_view modules);

// The text with every dtype it names for the weights (dtype, torch_dtype; in it and
// in the configs of its parts) replaced by `shown` where it is another float;
// the rest byte for byte.  REQUIRES: ReadConfigFacts accepts it.
std::string WithDType(std::string_view config, DType shown);

// The text without its quantization_config, for weights that are decoded; the rest byte for byte.
// REQUIRES: ReadConfigFacts accepts it.
std::string WithoutQuantisation(std::string_view config);

// The text with keys of transformers 4 behind the others, in it and in the configs of its parts:
// rope_theta, rope_scaling and partial_rotary_factor out of rope_parameters, which transformers 4
// does not know: it would compute with its own defaults, without a word.  Transformers 5 reads the
// same config with and without them.  A key that is there stays as it is; the rest is kept byte for
// byte.  REQUIRES: ReadConfigFacts accepts it.
std::string WithOlderKeys(std::string_view config);

}  // namespace ckptfs
