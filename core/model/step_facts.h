// SPDX-License-Identifier: Apache-2.0
//
// StepFacts is what a source found out about a step and what no file of it says in these words:
// which tool wrote it, which files beside the model it carries, where its state dict had what.
// Views ask them.  Documents hold what belongs to the job: arguments, schedulers, random states.
//
// Thread safety: values.
// Units: offsets are bytes.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/io/blob.h"
#include "core/model/key_shape.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// The directory, or the file, in which a training tool saved the step: all files there are the
// save's.
struct ToolDirectory {
  std::string tool;  // as formats/tools/tool_files.cc calls it: "trainer"
  std::string own;   // below the first root; "" is that root
  // Files there, by their paths below `own`, whose tensors lie in other files of the store by now:
  // nobody can show them as they were.
  std::set<std::string> packed = {};
  bool operator==(const ToolDirectory&) const = default;
};

// The files of such a directory, by their paths below it; if it is a file, its name.
std::map<std::string, BlobIndex> FilesOf(const ToolDirectory& tool, std::span<const Blob> blobs);

inline constexpr std::string_view kModelConfig = "config.json";

// A file that loaders look for beside a model's weights.
struct ModelFile {
  std::string name;  // or <folder>/<name>
  std::variant<std::shared_ptr<const std::string>, BlobIndex> body;

  const std::string* text() const;  // null: it is a blob
  // Texts are compared, not where they lie.
  bool operator==(const ModelFile& other) const;
};

// Sorted by name.
struct ModelFiles {
  std::vector<ModelFile> files;

  const ModelFile* Find(std::string_view name) const;
  // The text of config.json, null without one.
  const std::string* config() const;
  bool operator==(const ModelFiles&) const = default;
};

inline constexpr uint64_t kMaxObjectParts = uint64_t{1} << 20;

// How a directory that Megatron saved names what a step has under the names of its modules.
struct ModuleKeys {
  // One key holds a tensor of all layers, stacked; otherwise each layer has a key of its own.
  bool stacked = true;
  // Objects that modules keep beside their tensors, by name, and the grid of each one's 1 to
  // kMaxObjectParts parts: "decoder.layers.mlp.linear_fc1._extra_state" in 4 parts.
  std::map<std::string, Shape> objects = {};
  bool operator==(const ModuleKeys&) const = default;
};

struct StepFacts {
  std::optional<KeyShape> keys;  // of a state dict that torch.distributed.checkpoint saved
  std::optional<ToolDirectory> tool;
  std::optional<ModuleKeys> modules;  // of a state dict that Megatron saved
  ModelFiles model_files;
  bool config_made = false;  // config.json is of model_files, but lay nowhere as a file
  // Where the tensors begin of safetensors files that may be shown whole, under the source's own
  // names alone.
  std::map<BlobIndex, uint64_t> safetensors;
  bool operator==(const StepFacts&) const = default;
};

}  // namespace ckptfs
