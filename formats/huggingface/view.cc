// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/view.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/view/shard.h"
#include "core/view/view_tree.h"
#include "formats/huggingface/config_match.h"
#include "formats/huggingface/shard_index.h"
#include "formats/huggingface/shown_tensors.h"
#include "formats/huggingface/whole_files.h"
#include "formats/tools/config_text.h"
#include "formats/tools/source_traits.h"

namespace ckptfs {
namespace {

using huggingface::ShardName;
using huggingface::ShownTensor;
using huggingface::WholeFile;

constexpr std::string_view kTop = "huggingface";
constexpr std::string_view kAdapterName = "adapter_model.safetensors";
constexpr std::string_view kIndexName = "model.safetensors.index.json";

// Consecutive tensors of the step; a file widest dtype first, so that each lies
// aligned.  Or those of a source's file, as they lie there.
using Shard = std::vector<ShownTensor>;

std::vector<SafetensorsEntry> EntriesOf(const StepModel& step, const Shard& shard) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(shard.size());
  for (const ShownTensor& tensor : shard) {
    entries.push_back({tensor.name, tensor.dtype, step.atom(tensor.atom).shape, 0, 0});
  }
  return entries;
}

const std::map<std::string, std::string>& Metadata() {
  static const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  return metadata;
}

Result<Plan> PlanOf(const StepModel& step, const Shard& shard) {
  std::vector<SafetensorsEntry> entries = EntriesOf(step, shard);
  CKPT_ASSIGN_OR_RETURN(std::string header, RenderSafetensorsHeader(Metadata(), entries));
  PlanBuilder plan;
  plan.Literal(std::move(header));
  for (const ShownTensor& tensor : shard) plan.Append(tensor.bytes, tensor.Segment());
  return std::move(plan).Finish();
}

uint64_t HeapOf(const StepModel& step, const Shard& shard) {
  uint64_t bytes = 0;
  for (const ShownTensor& tensor : shard) {
    // The local tensor has one piece.
    bytes += sizeof(tensor) + tensor.name.capacity() + sizeof(LocalTensor) + sizeof(Piece) +
             6 * sizeof(uint64_t) * step.atom(tensor.atom).shape.size();
  }
  return bytes;
}

std::vector<Shard> SplitIntoShards(std::vector<ShownTensor> tensors) {
  std::vector<uint64_t> sizes;
  sizes.reserve(tensors.size());
  for (const ShownTensor& tensor : tensors) sizes.push_back(tensor.bytes);
  std::vector<Shard> shards;
  auto next = std::make_move_iterator(tensors.begin());
  for (const size_t count : huggingface::SplitShards(sizes)) {
    shards.emplace_back(next, next + static_cast<ptrdiff_t>(count));
    next += static_cast<ptrdiff_t>(count);
  }
  if (shards.empty()) shards.emplace_back();
  for (Shard& shard : shards) {
    std::stable_sort(shard.begin(), shard.end(), [](const ShownTensor& a, const ShownTensor& b) {
      return ByteWidth(a.dtype) > ByteWidth(b.dtype);
    });
  }
  return shards;
}

std::string PathOf(std::string_view name) { return StrCat(kTop, "/", name); }

// As save_pretrained cuts them, or the source's own files.
std::vector<Shard> ShardsOf(std::vector<ShownTensor> tensors,
                            const std::vector<WholeFile>& wholes) {
  if (wholes.empty()) return SplitIntoShards(std::move(tensors));
  std::vector<Shard> shards;
  for (const WholeFile& whole : wholes) {
    Shard& shard = shards.emplace_back();
    for (const size_t i : whole.tensors) shard.push_back(std::move(tensors[i]));
  }
  return shards;
}

uint64_t BytesOf(const Shard& shard) {
  uint64_t bytes = 0;
  for (const ShownTensor& tensor : shard) bytes += tensor.bytes;
  return bytes;
}

// `wholes`: the shards as files of the source, or empty.
Status AddWeights(const std::shared_ptr<const ShownState>& shown, std::vector<Shard> shards,
                  const std::vector<WholeFile>& wholes, ViewTree& tree) {
  huggingface::WeightMap map;
  uint64_t total = 0, parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = ShardName(i, shards.size());
    const auto shard = std::make_shared<const Shard>(std::move(shards[i]));
    const uint64_t bytes = BytesOf(*shard);
    for (const ShownTensor& tensor : *shard) {
      map.emplace(tensor.name, name);
      parameters += tensor.trainable ? tensor.elements : 0;
    }
    total += bytes;
    if (!wholes.empty()) {
      tree.AddBlob(PathOf(name), wholes[i].blob, Reading::kMapped);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t header,
                          SafetensorsHeaderSize(Metadata(), EntriesOf(shown->step(), *shard)));
    tree.AddMade(
        PathOf(name), header + bytes, Reading::kMapped,
        [shown, shard] { return PlanOf(shown->step(), *shard); }, HeapOf(shown->step(), *shard));
  }
  if (shards.size() < 2) return {};
  CKPT_ASSIGN_OR_RETURN(std::string index, huggingface::PrintShardIndex(map, total, parameters));
  tree.AddText(PathOf(kIndexName), std::make_shared<const std::string>(std::move(index)));
  return {};
}

// The config's dtype follows the shown weights, and readers of transformers 4 find their keys in
// it, except where a Hugging Face directory is shown as it is.
std::string ConfigText(const StepModel& step, const Layout& layout, const std::string& config) {
  const auto shown = layout.dtype ? layout.dtype : step.model_dtype;
  const bool as_it_is = !layout.dtype && TraitsOf(step).pretrained;
  if (as_it_is) return config;
  return WithOlderKeys(shown ? WithDType(config, *shown) : config);
}

void AddModelFiles(const ShownState& shown, const ModelFiles& models, ViewTree& tree) {
  for (const ModelFile& file : models.files) {
    if (const auto* blob = std::get_if<BlobIndex>(&file.body)) {
      tree.AddBlob(PathOf(file.name), *blob, Reading::kRandom);
      continue;
    }
    auto text = std::get<ViewTree::Text>(file.body);
    if (file.name == kModelConfig) {
      text = std::make_shared<const std::string>(ConfigText(shown.step(), shown.layout(), *text));
    }
    tree.AddText(PathOf(file.name), std::move(text));
  }
}

// An adapter as PEFT's save_pretrained writes it, in one file, or as the source's own.
Result<std::shared_ptr<const View>> OpenAdapter(const std::shared_ptr<const ShownState>& shown,
                                                const ModelFiles& files) {
  const StepModel& step = shown->step();
  CKPT_RETURN_IF_ERROR(CheckDegrees(step, shown->layout()));
  CKPT_RETURN_IF_ERROR(shown->CheckNames());
  CKPT_ASSIGN_OR_RETURN(Shard tensors, huggingface::ShowAdapter(*shown));
  auto tree = std::make_shared<ViewTree>(shown);
  const auto wholes = huggingface::WholeFilesOf(step, tensors);
  std::stable_sort(tensors.begin(), tensors.end(), [](const ShownTensor& a, const ShownTensor& b) {
    return ByteWidth(a.dtype) > ByteWidth(b.dtype);
  });
  const auto shard = std::make_shared<const Shard>(std::move(tensors));
  if (wholes.size() == 1) {
    tree->AddBlob(PathOf(kAdapterName), wholes[0].blob, Reading::kMapped);
  } else {
    CKPT_ASSIGN_OR_RETURN(const uint64_t header,
                          SafetensorsHeaderSize(Metadata(), EntriesOf(step, *shard)));
    tree->AddMade(
        PathOf(kAdapterName), header + BytesOf(*shard), Reading::kMapped,
        [shown, shard] { return PlanOf(shown->step(), *shard); }, HeapOf(step, *shard));
  }
  AddModelFiles(*shown, files, *tree);
  return tree;
}

// Why there can be no directory of transformers, whatever its files.
Result<ConfigFacts> CheckStep(const StepModel& step, const Layout& layout,
                              const std::string& config) {
  CKPT_RETURN_IF_ERROR(CheckDegrees(step, layout));
  const Naming naming = layout.naming == Naming::kAsSource ? step.layout.naming : layout.naming;
  if (naming == Naming::kPipe) {
    return Fail(Error{ErrorCode::kUnsupported,
                      "its names are those of a pipeline, which transformers does not know"}
                    .Needing("add 'plain' to the layout"));
  }
  CKPT_ASSIGN_OR_RETURN(ConfigFacts facts, ReadConfigFacts(config));
  if (!facts.quantisation.empty() && layout.dtype) {
    return Fail(Error{ErrorCode::kUnsupported, StrCat("quantised weights (", facts.quantisation,
                                                      ") are only shown as "
                                                      "stored")}
                    .Needing("leave the dtype out of the layout"));
  }
  return facts;
}

}  // namespace

Result<std::shared_ptr<const View>> HuggingFaceFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const StepModel& step = shown->step();
  const Layout& layout = shown->layout();
  if (step.facts.model_files.Find(kAdapterConfig) != nullptr) {
    return OpenAdapter(shown, step.facts.model_files);
  }
  const ModelFiles& models = ChosenModelFiles(step.facts, given_);
  if (models.config() == nullptr) {
    // A config.json would not cure foreign names; of those that are translated nothing is known.
    if (shown->CheckNames()) CKPT_RETURN_IF_ERROR(huggingface::CheckForeign(*shown));
    return Fail(
        Error{ErrorCode::kUnsupported, "no config.json in the step's directory or beside it"}
            .Needing("`--hf-config DIR` of `mount`, `export` and `explain` gives one"));
  }
  CKPT_ASSIGN_OR_RETURN(const ConfigFacts facts, CheckStep(step, layout, *models.config()));
  CKPT_RETURN_IF_ERROR(shown->CheckNames());
  CKPT_ASSIGN_OR_RETURN(std::vector<ShownTensor> tensors, huggingface::ShowTensors(*shown));
  auto tree = std::make_shared<ViewTree>(shown);
  const auto source = &models != &step.facts.model_files
                          ? huggingface::ConfigSource::kElsewhere
                          : huggingface::CarriedConfigOf(step, facts);
  CKPT_ASSIGN_OR_RETURN(auto lines, huggingface::MatchConfig(step, facts, tensors, source));
  for (std::string& line : lines) tree->LeaveOut(std::move(line));
  const auto wholes = huggingface::WholeFilesOf(step, tensors);
  CKPT_RETURN_IF_ERROR(AddWeights(shown, ShardsOf(std::move(tensors), wholes), wholes, *tree));
  AddModelFiles(*shown, models, *tree);
  return tree;
}

}  // namespace ckptfs
