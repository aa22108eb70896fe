// SPDX-License-Identifier: Apache-2.0
//
// StepFiles are the DCP directories that one step consists of: itself, or what a tool puts into
// it.  The keys tell which of them has the weights.
//
//   pytorch_model_fsdp_0/, optimizer_0/   accelerate and transformers' Trainer: of several models
//                                         the first
//   model_and_optim/                      OLMo-core, beside train/rank0.pt
//   model/, optim/                        NeMo Automodel; model/ may be shards of safetensors
//   *.safetensors and .metadata           transformers' save_pretrained and, in the same directory,
//   *.safetensors and optimizer/          or in one below it, save_optimizer_distributed
//
// A DCP directory is one with `.metadata`, which torch writes last, by a rename; with
// `__<rank>.metadata` of each rank, where ranks saved by themselves; or, of the writer of
// safetensors that writes no metadata, with files whose headers say DCP_SHARDING_INFO.
// Megatron's torch_dist (common.pt, metadata.json) is not one, though DCP wrote it:
// formats/megatron reads it.
//
// Thread safety: pure but for looking at files.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs::dcp {

inline constexpr std::string_view kMetadataFile = ".metadata";

// One DCP directory.
struct PartFiles {
  std::string directory;            // below the step: "" or "pytorch_model_fsdp_0"
  bool metadata = false;            // .metadata is there
  std::vector<std::string> ranks;   // __0.metadata, __1.metadata ..., in order
  std::vector<std::string> shards;  // safetensors files with sharding information
  bool whole = false;   // without it: each tensor of `shards` is whole (save_pretrained's)
  bool beside = false;  // taken where the other parts have nothing but an optimizer
  bool data = false;    // *.distcp is there

  // True if the directory is a step, whole or not.
  bool Any() const { return metadata || !ranks.empty() || !shards.empty() || data; }
};

// The files of a directory below the root; nothing where there is no such directory.
Result<PartFiles> ListPart(const Root& root, const std::string& directory);

// The parts of the step that a directory is; empty if it is not a step.
Result<std::vector<PartFiles>> ListParts(const Root& root, const std::string& directory);

// The folders of a step of several models that are not the first's: "pytorch_model_fsdp_1",
// "optimizer_1".  ListParts takes the first's alone.
Result<std::vector<std::string>> FoldersOfOtherModels(const Root& root,
                                                      const std::string& directory);

// "pytorch_model_fsdp_0", "optimizer_1": what is a part where it stands beside another.
bool IsPartName(std::string_view name);

// A part of an optimizer alone: "optimizer_0", "optim".
bool IsOptimizerPart(std::string_view name);

// ".metadata", "__0.metadata", "__0_0.distcp": what DCP's writers call the files of a directory.
bool IsFileName(std::string_view name);

}  // namespace ckptfs::dcp
