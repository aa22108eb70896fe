// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/rank_model.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

// All ranks of one save say these alike.
constexpr std::string_view kSameEntries[] = {"checkpoint_version", "iteration",
                                             "opt_param_scheduler",
                                             "num_floating_point_operations_so_far"};
constexpr std::string_view kSameArguments[] = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "world_size",
    "use_tp_pp_dp_mapping",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_layer_freq",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "params_dtype",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "no_save_optim",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "consumed_train_samples",
    "seed",
    "lr",
};
constexpr double kVersion = 3.0;

bool IsNothing(PickleRef value) { return !value || value.IsNone(); }

Result<bool> AreEqual(PickleRef one, PickleRef other) {
  if (IsNothing(one) || IsNothing(other)) return IsNothing(one) == IsNothing(other);
  CKPT_ASSIGN_OR_RETURN(const Digest first, deepspeed::DigestOfValue(one));
  CKPT_ASSIGN_OR_RETURN(const Digest second, deepspeed::DigestOfValue(other));
  return first == second;
}

Result<RankChunk> ReadChunk(PickleRef module, std::string_view key, const CommonState& state) {
  if (!module) return Refuse("there is no '", key, "', which its args ask for");
  if (!module.IsDict()) return Refuse("'", key, "' is not a dict");
  if (module["language_model"]) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("'", key, "' is a model of before megatron-core (language_model)"));
  }
  CKPT_ASSIGN_OR_RETURN(TensorDict dict, TensorDictOf(module, state.file(), state.blob()));
  RankChunk out;
  for (NamedTensor& one : dict.tensors) {
    if (std::string_view(one.name).ends_with(kExtraState)) {
      out.objects.push_back(std::move(one.name));
    } else {
      out.tensors.push_back(std::move(one));
    }
  }
  for (std::string& name : dict.left_out) {
    if (!std::string_view(name).ends_with(kExtraState)) {
      return Refuse("'", name, "' of the module is not a tensor");
    }
    out.objects.push_back(std::move(name));
  }
  return out;
}

Status CheckVersion(const CommonState& state) {
  const PickleRef version = state.root()["checkpoint_version"];
  const auto number = version ? version.Number() : std::nullopt;
  if (number && *number >= kVersion) return {};
  return Fail(ErrorCode::kUnsupported,
              "its checkpoint_version is not 3.0: the rows of fused query, key and value have "
              "another order in earlier ones");
}

}  // namespace

Result<RankModel> ReadRankModel(CommonState state, const JobDegrees& job, const RankPlace& place) {
  CKPT_RETURN_IF_ERROR(CheckVersion(state));
  RankModel out;
  out.place = place;
  out.folder = FolderOf(job, place);
  for (uint32_t i = 0; i < job.chunks; ++i) {
    const std::string key = job.chunks > 1 ? StrCat("model", i) : "model";
    CKPT_ASSIGN_OR_RETURN(RankChunk chunk, ReadChunk(state.root()[key], key, state));
    out.chunks.push_back(std::move(chunk));
  }
  const std::string more = job.chunks > 1 ? StrCat("model", job.chunks) : "model0";
  if (state.root()[more]) {
    return Refuse("there is '", more, "', but its args say ", job.chunks,
                  " virtual stages (virtual_pipeline_model_parallel_size)");
  }
  out.state = std::move(state);
  return out;
}

Status CheckSameSave(const RankModel& first, const RankModel& other) {
  for (const std::string_view key : kSameEntries) {
    CKPT_ASSIGN_OR_RETURN(const bool equal,
                          AreEqual(first.state.root()[key], other.state.root()[key]));
    if (!equal) {
      return Refuse("its '", key, "' is not that of ", first.folder,
                    ": these files are not of one save");
    }
  }
  for (const std::string_view name : kSameArguments) {
    CKPT_ASSIGN_OR_RETURN(const bool equal,
                          AreEqual(first.state.ArgumentOf(name), other.state.ArgumentOf(name)));
    if (!equal) {
      return Refuse("its args say another ", name, " than those of ", first.folder,
                    ": these files are not of one job");
    }
  }
  return {};
}

Status CheckWriters(const JobDegrees& job, const std::vector<RankModel>& ranks) {
  std::set<int64_t> numbers;
  for (const RankModel& rank : ranks) {
    const auto number = rank.state.Argument("rank");
    if (!number || *number < 0) return {};
    numbers.insert(*number);
  }
  if (numbers.size() == 1 && ranks.size() > 1) return {};
  for (const RankModel& rank : ranks) {
    const auto number = static_cast<uint64_t>(*rank.state.Argument("rank"));
    const auto place = PlaceOfRank(job, rank.state, number);
    if (!place || *place == rank.place) continue;
    return Refuse(rank.folder, "/", kRankFile, ": its args say that rank ", number,
                  " wrote it, whose place is ", FolderOf(job, *place));
  }
  return {};
}

}  // namespace ckptfs::megatron
