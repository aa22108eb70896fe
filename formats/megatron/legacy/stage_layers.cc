// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/stage_layers.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>

#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

// Arguments with which stages have unequal numbers of layers.
constexpr std::string_view kUneven[] = {
    "decoder_first_pipeline_num_layers",       "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",          "standalone_embedding_stage"};

// Layers of a chunk; they are counted from 0 without a gap.
Result<uint64_t> CountOf(const RankChunk& chunk) {
  std::set<uint64_t> layers;
  for (const NamedTensor& one : chunk.tensors) {
    if (const auto name = LayeredNameOf(one.name)) layers.insert(name->layer);
  }
  if (!layers.empty() && *layers.rbegin() + 1 != layers.size()) {
    return Refuse("its layers are not counted from 0 without a gap");
  }
  return layers.size();
}

bool IsUneven(const CommonState& state) {
  return std::ranges::any_of(kUneven, [&](std::string_view name) {
    const PickleRef value = state.ArgumentOf(name);
    return value && !value.IsNone() && value.Bool() != false;
  });
}

// The layers of a stage, those of all its virtual stages, as an argument says them.
Status CheckStage(const CommonState& state, std::string_view name, uint64_t layers,
                  std::string_view which) {
  const auto said = state.Argument(name);
  if (!said || static_cast<uint64_t>(*said) == layers) return {};
  return Refuse("the files of the ", which, " stage have ", layers, " layers, but args say ", name,
                " ", *said);
}

}  // namespace

Result<StageLayers> StageLayers::Make(const JobDegrees& job, const std::vector<RankModel>& ranks) {
  std::vector<std::optional<uint64_t>> counts(size_t{job.chunks} * job.pp);
  for (const RankModel& rank : ranks) {
    for (uint32_t chunk = 0; chunk < job.chunks; ++chunk) {
      auto count = CountOf(rank.chunks[chunk]);
      if (!count) return Fail(std::move(count).error().WithContext(rank.folder));
      auto& known = counts[size_t{chunk} * job.pp + rank.place.pp];
      if (known && *known != *count) {
        return Refuse(rank.folder, ": it has ", *count, " layers, another rank of its stage ",
                      *known);
      }
      known = *count;
    }
  }
  StageLayers out;
  out.stages_ = job.pp;
  uint64_t next = 0;
  for (const auto& count : counts) {
    out.first_.push_back(next);
    next += *count;
  }
  if (next != job.layers) {
    return Refuse("the stages have ", next, " layers together, but args say num_layers ",
                  job.layers);
  }
  const CommonState& state = ranks.front().state;
  const auto of_stage = [&](uint32_t stage) {
    uint64_t layers = 0;
    for (uint32_t chunk = 0; chunk < job.chunks; ++chunk) {
      layers += *counts[size_t{chunk} * job.pp + stage];
    }
    return layers;
  };
  if (IsUneven(state)) {
    CKPT_RETURN_IF_ERROR(CheckStage(state, kUneven[0], of_stage(0), "first"));
    CKPT_RETURN_IF_ERROR(CheckStage(state, kUneven[1], of_stage(job.pp - 1), "last"));
    return out;
  }
  for (const auto& count : counts) {
    if (*count * counts.size() == job.layers) continue;
    return Refuse("a stage has ", *count, " of ", job.layers, " layers, and args do not say ",
                  "that the ", counts.size(), " stages are uneven");
  }
  return out;
}

}  // namespace ckptfs::megatron
