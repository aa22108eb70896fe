// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/rank_places.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kFolder = "mp_rank_";
constexpr int64_t kMaxDegree = 1 << 15;
constexpr uint64_t kMaxFiles = 1 << 16;

// Arguments of models whose stages are not those of one decoder.
constexpr std::string_view kOtherStages[] = {"pipeline_model_parallel_split_rank",
                                             "encoder_tensor_model_parallel_size",
                                             "encoder_pipeline_model_parallel_size"};

std::string Padded(uint32_t number, size_t digits) {
  std::string text = std::to_string(number);
  if (text.size() < digits) text.insert(0, digits - text.size(), '0');
  return text;
}

// A degree that an argument says; `otherwise` where it is None, or not there.
Result<uint32_t> Degree(const CommonState& state, std::string_view name,
                        std::optional<uint32_t> otherwise) {
  const PickleRef value = state.ArgumentOf(name);
  if (!value || value.IsNone()) {
    if (otherwise) return *otherwise;
    return Refuse("its args do not say ", name);
  }
  const auto number = value.Int();
  if (!number || *number < 1 || *number > kMaxDegree) {
    return Refuse("its args: ", name, " is not a degree");
  }
  return static_cast<uint32_t>(*number);
}

}  // namespace

Result<JobDegrees> DegreesOf(const CommonState& state) {
  for (const std::string_view name : kOtherStages) {
    const PickleRef value = state.ArgumentOf(name);
    if (!value || value.IsNone() || value.Int() == 0) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat("its args say ", name, ": a model of an encoder and a decoder"));
  }
  JobDegrees out;
  CKPT_ASSIGN_OR_RETURN(out.tp, Degree(state, "tensor_model_parallel_size", std::nullopt));
  CKPT_ASSIGN_OR_RETURN(out.pp, Degree(state, "pipeline_model_parallel_size", std::nullopt));
  CKPT_ASSIGN_OR_RETURN(out.chunks, Degree(state, "virtual_pipeline_model_parallel_size", 1));
  CKPT_ASSIGN_OR_RETURN(out.ep, Degree(state, "expert_model_parallel_size", 1));
  CKPT_ASSIGN_OR_RETURN(out.etp, Degree(state, "expert_tensor_parallel_size", out.tp));
  if (out.ep == 1 && !state.Argument("num_experts")) out.etp = out.tp;  // there are no experts
  const auto layers = state.Argument("num_layers");
  if (!layers || *layers < 1 || *layers > (1 << 20))
    return Refuse("its args do not say num_layers");
  out.layers = static_cast<uint64_t>(*layers);
  const auto world = state.Argument("world_size");
  if (world && *world > 0) out.world = static_cast<uint64_t>(*world);
  return out;
}

Result<std::vector<RankPlace>> PlacesOfJob(const JobDegrees& job) {
  const uint64_t ranks = std::max<uint64_t>(job.tp, uint64_t{job.etp} * job.ep);
  if (ranks * job.pp > kMaxFiles) {
    return Refuse("its args say ", ranks, " ranks of ", job.pp, " stages, more than ", kMaxFiles);
  }
  std::vector<RankPlace> out;
  std::set<std::string> seen;
  for (uint32_t pp = 0; pp < job.pp; ++pp) {
    for (uint32_t r = 0; r < ranks; ++r) {
      const RankPlace place{r % job.tp, pp, (r / job.etp) % job.ep, r % job.etp};
      if (!seen.insert(FolderOf(job, place)).second) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat("its args say expert_tensor_parallel_size ", job.etp,
                           " and tensor_model_parallel_size ", job.tp,
                           ": several ranks of experts write one file, ", FolderOf(job, place)));
      }
      out.push_back(place);
    }
  }
  return out;
}

std::string FolderOf(const JobDegrees& job, const RankPlace& place) {
  std::string out = StrCat(kFolder, Padded(place.tp, 2));
  if (job.pp > 1) out += StrCat("_", Padded(place.pp, 3));
  if (job.ep > 1) out += StrCat("_", Padded(place.ep, 3));
  return out;
}

std::optional<RankPlace> PlaceOfRank(const JobDegrees& job, const CommonState& state,
                                     uint64_t rank) {
  const PickleRef other = state.ArgumentOf("use_tp_pp_dp_mapping");
  const bool default_order = !other || other.IsNone() || other.Bool() == false;
  if (!default_order || !job.world || rank >= *job.world || *job.world % job.pp != 0) {
    return std::nullopt;
  }
  const uint64_t of_stage = *job.world / job.pp;
  const uint64_t r = rank % of_stage;
  return RankPlace{static_cast<uint32_t>(r % job.tp), static_cast<uint32_t>(rank / of_stage),
                   static_cast<uint32_t>(r / job.etp % job.ep), static_cast<uint32_t>(r % job.etp)};
}

bool IsRankFolder(std::string_view name) {
  if (!name.starts_with(kFolder)) return false;
  name.remove_prefix(kFolder.size());
  size_t numbers = 0;
  while (true) {
    size_t digits = 0;
    while (digits < name.size() && IsDigit(name[digits])) ++digits;
    if (digits == 0 || digits > 9 || ++numbers > 3) return false;
    name.remove_prefix(digits);
    if (name.empty()) return true;
    if (name.front() != '_') return false;
    name.remove_prefix(1);
  }
}

}  // namespace ckptfs::megatron
