// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/recognise.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using Said = std::string;  // empty: nothing that is known

constexpr std::string_view kNotYet = ": not readable yet";

// Files by their endings.
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> kFiles = {
    std::pair(".nemo", "NeMo (an archive; `tar xf` unpacks it)"),
    std::pair(".gguf", "GGUF, quantised for llama.cpp"),
    std::pair(".msgpack", "Flax weights"),
    std::pair(".h5", "Keras or TensorFlow weights"),
    std::pair(".keras", "Keras weights"),
};

// The files that Megatron's ranks wrote into a mp_rank_XX of theirs with a distributed optimizer,
// before its file was distrib_optim.pt.
constexpr std::array<std::string_view, 2> kMegatronFiles = {"model_rng.pt", "optim.pt"};

bool HasEnding(const std::vector<std::string>& names, std::string_view ending) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.ends_with(ending); });
}

std::optional<std::string> FirstWith(const std::vector<std::string>& names,
                                     std::string_view beginning) {
  const auto found = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
    return name.starts_with(beginning);
  });
  return found == names.end() ? std::nullopt : std::optional(*found);
}

Said OfFile(std::string_view name) {
  for (const auto& [ending, what] : kFiles) {
    if (name.ends_with(ending)) return StrCat(what, kNotYet);
  }
  return "";
}

Said OfMegatronDirectory(const StepEntries& entries) {
  if (!entries.HasFile("common.pt") || !entries.HasFile("metadata.json")) return "";
  const bool dist = entries.HasFile(".metadata");
  if (dist) return "Megatron torch_dist, but its metadata.json does not say so";
  return StrCat("Megatron dist_checkpointing (zarr)", kNotYet);
}

// Names the framework that wrote mp_rank_XX; "" if none did.
Result<std::string_view> OfMegatron(const Root& root, const std::string& path,
                                    const StepEntries& entries) {
  const auto rank = FirstWith(entries.directories, "mp_rank_");
  if (!rank) return std::string_view();
  const auto inside = ListStepEntries(root, JoinPath(path, *rank));
  if (!inside && IsOutOfReach(inside.error())) return std::string_view();
  if (!inside) return Fail(Error(inside.error()));
  const bool megatron = std::any_of(kMegatronFiles.begin(), kMegatronFiles.end(),
                                    [&](std::string_view file) { return inside->HasFile(file); });
  if (megatron)
    return std::string_view("Megatron legacy (model_rng.pt and optim.pt in mp_rank_XX)");
  const bool nemo = HasEnding(inside->files, ".ckpt");
  return nemo ? std::string_view("NeMo 1 (mp_rank_XX)") : std::string_view();
}

Said OfOthers(const StepEntries& entries) {
  if (entries.HasDirectory("weights") && entries.HasDirectory("context")) {
    return StrCat("NeMo 2 (weights/ and context/)", kNotYet);
  }
  if (entries.HasFile("model_config.yaml") && entries.HasDirectory("model_weights")) {
    return StrCat("NeMo 1, unpacked (model_weights/)", kNotYet);
  }
  if (entries.HasFile("metadata.pkl") && FirstWith(entries.files, "model_")) {
    return StrCat("torch_checkpointing (metadata.pkl)", kNotYet,
                  "; torchtitan's CheckpointManager saves with DCP, which is");
  }
  if (entries.HasFile("_CHECKPOINT_METADATA") || entries.HasFile("manifest.ocdbt")) {
    return StrCat("Orbax (JAX)", kNotYet);
  }
  if (entries.HasFile("params.json") && FirstWith(entries.files, "consolidated.")) {
    return StrCat("consolidated.XX.pth as Meta publishes Llama", kNotYet,
                  "; transformers has a script that converts them");
  }
  if (HasEnding(entries.files, ".index") && FirstWith(entries.files, "checkpoint")) {
    return StrCat("a TensorFlow checkpoint", kNotYet);
  }
  return "";
}

Said OfDirectory(const StepEntries& entries) {
  Said said = OfMegatronDirectory(entries);
  return said.empty() ? OfOthers(entries) : said;
}

constexpr std::string_view kSafetensors = ".safetensors";

// Weights by the ending of the name; tools' own files of other content end so, too.
bool MayBeWeights(const std::string& name) {
  constexpr std::array<std::string_view, 4> kOthers = {"training_args", "optimizer", "scheduler",
                                                       "sampler"};
  const bool other =
      std::ranges::any_of(kOthers, [&](std::string_view begin) { return name.starts_with(begin); });
  return name.ends_with(kSafetensors) || (name.ends_with(".bin") && !other);
}

// The first weights of a whole save under a name that no step's has: diffusers' own, in the step's
// directory or a folder of it; "" if there are none.
Result<std::string> OtherWeights(const Root& root, const std::string& path,
                                 const StepEntries& entries) {
  const bool ended = std::ranges::any_of(entries.files, [](const std::string& name) {
    return name == "trainer_state.json" || name.starts_with("random_states_");
  });
  if (!ended) return std::string();
  const auto find = [](const StepEntries& in) {
    return std::ranges::find_if(in.files, MayBeWeights);
  };
  if (const auto own = find(entries); own != entries.files.end()) return *own;
  for (const std::string& folder : entries.directories) {
    const auto inside = ListStepEntries(root, JoinPath(path, folder));
    if (!inside && !IsOutOfReach(inside.error())) return Fail(Error(inside.error()));
    if (!inside) continue;
    const auto found = find(*inside);
    if (found != inside->files.end()) return JoinPath(folder, *found);
  }
  return std::string();
}

}  // namespace

Result<std::optional<Recognised>> RecogniseUnread(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(root, path));
  Said said;
  std::optional<uint64_t> step;
  if (directory) {
    const auto entries = ListStepEntries(root, path);
    if (!entries && !IsOutOfReach(entries.error())) return Fail(Error(entries.error()));
    if (entries) said = OfDirectory(*entries);
    if (entries && said.empty()) {
      CKPT_ASSIGN_OR_RETURN(const std::string_view ranks, OfMegatron(root, path, *entries));
      if (!ranks.empty()) said = StrCat(ranks, kNotYet);
    }
    if (entries && said.empty()) {
      step = StepNumber(LastComponent(root.PathOf(path)));
    }
    if (step) {
      said = MissingOfBegun(*entries);
      CKPT_ASSIGN_OR_RETURN(const std::string other, OtherWeights(root, path, *entries));
      if (!other.empty()) {
        step.reset();  // nothing of it is waited for
        said = StrCat("its weights are ", other,
                      ", which no step of this tool is read by: adopt that file, or its folder");
      }
    }
  } else {
    said = OfFile(LastComponent(root.PathOf(path)));
  }
  if (said.empty()) return std::optional<Recognised>();
  return std::optional(Recognised{std::move(said), step});
}

ToolHints HintsOfTools() { return {RecogniseUnread, NamesOfTools()}; }

}  // namespace ckptfs
