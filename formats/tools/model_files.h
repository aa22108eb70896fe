// SPDX-License-Identifier: Apache-2.0
//
// ModelFiles are the files that loaders look for beside a model's weights: config.json,
// generation_config.json, tokenizers, templates, code.  A step carries those of its
// directory, byte for byte: short ones in the manifest, others as blobs.  It carries
// folders that loaders look into: the tokenizer's templates and sentence-transformers'
// modules (StepFacts::model_files).  A source may make the config.json of what the job itself says
// (formats/megatron/args_config.h).  It counts less than one that somebody gives (mount
// --hf-config), who may know what no argument says: the ids of the tokenizer.
//
// Thread safety: values and pure functions but for reading files.
// Units: bytes.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"

namespace ckptfs {

// PEFT writes it beside an adapter.
inline constexpr std::string_view kAdapterConfig = "adapter_config.json";

// True for the names of such files; of weights, their index, and what a trainer
// keeps for itself it is false.
bool IsModelFile(std::string_view name);

// The model files in the first directory that has a config.json, of `directory`
// (below the root, "" or with '/' at the end) and those above it up to the root,
// carried with the step.  A file that cannot be read is left out.  Returns the carried
// files.  BLOCKS: on reading them.
// REQUIRES: all files that something is read of were added to the assembler.
Result<ModelFiles> CarryModelFiles(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                   std::string directory);

// The same of an adapter's directory, which has an adapter_config.json; only of this directory: a
// config.json above it is not the adapter's.
Result<ModelFiles> CarryAdapterFiles(Assembler& assembler, const std::shared_ptr<const Root>& root,
                                     std::string directory);

// Carries a config.json that lies nowhere as a file: what a source says, in transformers' words.
// REQUIRES: no model files are carried, and none will be.
void CarryConfig(Assembler& assembler, std::string config);

// True for <folder>/<name> of a file that may be carried out of a folder.
bool IsFolderFile(std::string_view path);

// Notes that a file which nothing is read of is left out, or fails where a device
// does.
Status LeaveOut(Error why, StepModel& header);

// The files to show or ask: the step's own, `given` where it has none or its config was made.
inline const ModelFiles& ChosenModelFiles(const StepFacts& own,
                                          const std::optional<ModelFiles>& given) {
  return given && (own.model_files.config() == nullptr || own.config_made) ? *given
                                                                           : own.model_files;
}

// The model files of a directory that belongs to no step (mount --hf-config), as
// texts.  kInvalid if it does not have a config.json that is a JSON object, or
// they are long.
Result<ModelFiles> ReadModelFiles(const std::string& directory);

}  // namespace ckptfs
