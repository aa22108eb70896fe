// SPDX-License-Identifier: Apache-2.0
//
// The file names of a Hugging Face directory (transformers 5.23 modeling_utils.py
// _get_resolved_checkpoint_files), and which of them are its weights:
//
//   model.safetensors                      comes first,
//   model.safetensors.index.json           then this, with model-0000i-of-0000N.safetensors,
//   pytorch_model.bin                      then this,
//   pytorch_model.bin.index.json           then this, with pytorch_model-0000i-of-0000N.bin
//   pytorch_model_fsdp.bin                 then this: FSDP's whole state (Trainer, accelerate)
//   model.<variant>.safetensors, ...       where a directory has nothing else
//   adapter_model.safetensors, .bin        PEFT: additions to another model
//   checkpoint-<iteration>/                what a Trainer saves into its output
//   models--<owner>--<name>/snapshots/<revision>/   the hub's cache
//
// Thread safety: values and pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs::huggingface {

// The file that a directory's weights are read from.
struct WeightsName {
  std::string file;  // the weights, their index, or an adapter
  bool index = false;
  std::string variant;  // "fp16"; empty: the plain names
  bool adapter = false;
};

// PEFT's "adapter_model.safetensors" and ".bin".
bool IsAdapterFile(std::string_view name);

// Nothing if no name is that of weights.  kInvalid where only several variants are
// there.
Result<std::optional<WeightsName>> ChooseWeights(std::span<const std::string> names);

// The number of a shard and the number of shards in a name ("model-00001-of-00003.safetensors": 1,
// 3); nothing for other names and for an only shard.
struct ShardNumber {
  uint64_t shard = 0;
  uint64_t shards = 0;
};
std::optional<ShardNumber> ShardNumberOf(std::string_view name);

// True for what torch.load reads; other weights are safetensors.
bool IsTorchName(std::string_view name);

// The path of a shard below its index's directory, as an index names it: "x", "./x", "part/x".
// Nothing for one that leaves the directory.
std::optional<std::string> ShardPath(std::string_view named);

}  // namespace ckptfs::huggingface
