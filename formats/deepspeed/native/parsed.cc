// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/parsed.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "formats/deepspeed/native/slice_shapes.h"

namespace ckptfs::deepspeed::native {
namespace {

Status ReadModels(const TagFiles& files, Parsed& out) {
  std::map<RankKey, std::string> names;
  for (const auto& [mp, name] : files.names.model) names.emplace(RankKey{mp, 0}, name);
  if (names.empty()) names = files.names.stage3_model;
  const auto read = [](const TorchFile& file, BlobIndex blob, const RankKey& key) {
    return ReadModelStates(file, blob, ModelStatesWanted{key.dp == 0, key.dp == 0});
  };
  CKPT_ASSIGN_OR_RETURN(out.models, ReadEach(files, names, read));
  if (out.models.empty()) {
    return Refuse(files.step.Path(), ": no model states file");
  }
  const ModelStates& first = out.models.begin()->second;
  if (first.auto_experts && !files.names.optimizer.empty()) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(first.file,
                       ": saved with AutoEP (expert parallelism that DeepSpeed put into the model "
                       "itself) under ZeRO; optimizer states of its experts are not understood"));
  }
  return {};
}

Status ReadOthers(const TagFiles& files, Parsed& out) {
  const auto states = [&](const TorchFile& file, BlobIndex blob, const RankKey& key) {
    const auto model = out.models.find(RankKey{key.mp, 0});
    const bool shapes = model != out.models.end() && model->second.has_shapes;
    return ReadOptimizerStates(file, blob, key, {key.dp == 0, !shapes});
  };
  const auto tensors = [](const TorchFile& file, BlobIndex blob, const auto&) {
    return ReadTensorDict(file, blob);
  };
  CKPT_ASSIGN_OR_RETURN(out.optimizers, ReadEach(files, files.names.optimizer, states));
  CKPT_ASSIGN_OR_RETURN(out.layers, ReadEach(files, files.names.layers, tensors));
  CKPT_ASSIGN_OR_RETURN(out.experts, ReadEach(files, files.names.experts, tensors));
  return {};
}

Status SetDegrees(const TagFiles& files, Parsed& out) {
  const ModelStates& first = out.models.begin()->second;
  const StepFiles& names = files.names;
  const uint64_t dp_world = first.dp_world > 0 ? first.dp_world : names.DataRanks();
  const uint64_t mp_world = first.mp_world > 0 ? first.mp_world : names.ModelRanks();
  const auto mp = static_cast<uint32_t>(std::min<uint64_t>(mp_world, uint64_t{1} << 20));
  out.tp = first.tp_degree;
  out.pp = first.pp_degree;
  if (out.tp == 0 || out.pp == 0) {
    std::set<uint32_t> ranks;
    for (const auto& [key, name] : names.layers) ranks.insert(key.tp);
    out.tp = ranks.empty() ? mp : static_cast<uint32_t>(ranks.size());
    out.pp = mp / out.tp;
  }
  if (uint64_t{out.tp} * out.pp != mp) {
    return Refuse(first.file, ": tp ", out.tp, " x pp ", out.pp, " is not mp_world_size ", mp);
  }
  out.dp = static_cast<uint32_t>(std::min<uint64_t>(dp_world, 1u << 20));
  out.stage = out.optimizers.empty() ? 0 : out.optimizers.begin()->second.stage;
  return {};
}

Status CheckAllRanks(const TagFiles& files, const Parsed& parsed) {
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    if (!parsed.models.contains(RankKey{mp, 0})) {
      return Refuse(files.step.Path(), ": no model states of model-parallel rank ", mp, " of ",
                    parsed.model_ranks());
    }
    for (uint32_t dp = 0; dp < parsed.dp && parsed.stage > 0; ++dp) {
      if (parsed.optimizers.contains(RankKey{mp, dp})) continue;
      return Refuse(files.step.Path(), ": no optimizer states of data-parallel rank ", dp, " of ",
                    parsed.dp, ", model-parallel rank ", mp);
    }
  }
  return {};
}

// ZeRO's groups say how many expert-parallel ranks there were; without it only
// the ranks' files do.
Status CountExpertRanks(const TagFiles& files, Parsed& out) {
  if (out.stage != 0) {
    for (uint32_t mp = 0; mp < out.model_ranks(); ++mp) {
      for (size_t g = 0; g < out.model(mp).groups.size(); ++g) {
        out.ep = std::max(out.ep, out.ExpertRanks(mp, g).value_or(1));
      }
    }
    return {};
  }
  const auto& names = files.names.expert_optimizer;
  for (const auto& [key, name] : names) out.ep = std::max(out.ep, key.dp + 1);
  for (uint32_t rank = 0; rank < out.ep && out.ep > 1; ++rank) {
    if (names.contains(RankKey{0, rank})) continue;
    return Refuse(files.step.Path(), ": no optimizer states of expert-parallel rank ", rank, " of ",
                  out.ep);
  }
  if (out.dp % out.ep == 0) return {};
  return Refuse(files.step.Path(), ": files of ", out.ep,
                " expert-parallel ranks, which do not divide the ", out.dp, " data-parallel ranks");
}

Status CheckModelsAgree(const ModelStates& first, const ModelStates& other) {
  const std::pair<std::string_view, uint64_t ModelStates::*> rules[] = {
      {"global_steps", &ModelStates::global_steps},
      {"dp_world_size", &ModelStates::dp_world},
      {"mp_world_size", &ModelStates::mp_world}};
  for (const auto& [rule, member] : rules) {
    if (first.*member == other.*member) continue;
    return Refuse(other.file, ": ", rule, " is ", other.*member, ", but ", first.*member, " in ",
                  first.file, "; two runs lie in one directory");
  }
  if (first.ds_config == other.ds_config && first.ds_version == other.ds_version) return {};
  return Refuse(other.file, ": ds_config or ds_version differs from ", first.file,
                "; two runs lie in one directory");
}

Status CheckRank(const Parsed& parsed, const std::string& file, RankKey key) {
  if (key.mp < parsed.model_ranks() && key.dp < parsed.dp) return {};
  return Refuse(file, ": its rank is not below dp_world_size ", parsed.dp, " x mp_world_size ",
                parsed.model_ranks(), " of ", parsed.models.begin()->second.file,
                "; two runs lie in one directory: remove the earlier run's files (their times "
                "tell which)");
}

Status CheckOneRun(const Parsed& parsed) {
  const ModelStates& first = parsed.models.begin()->second;
  for (const auto& [key, states] : parsed.models) {
    CKPT_RETURN_IF_ERROR(CheckModelsAgree(first, states));
    CKPT_RETURN_IF_ERROR(CheckRank(parsed, states.file, key));
    const ModelStates& zero = parsed.model(key.mp);
    if (states.shapes != zero.shapes) {
      return Refuse(states.file, ": its param_shapes differ from those of ", zero.file,
                    "; two runs lie in one directory");
    }
  }
  for (const auto& [key, states] : parsed.optimizers) {
    CKPT_RETURN_IF_ERROR(CheckRank(parsed, states.file, key));
    const OptimizerStates& zero = parsed.optimizers.begin()->second;
    const bool same =
        states.stage == zero.stage && states.ds_config == zero.ds_config &&
        states.ds_version == zero.ds_version && states.trimmed == zero.trimmed &&
        states.partition_count == parsed.optimizers.at(RankKey{key.mp, 0}).partition_count;
    if (!same) {
      return Refuse(states.file,
                    ": its zero_stage, partition_count, ds_config or ds_version differs from ",
                    zero.file, "; two runs lie in one directory");
    }
    if (states.ds_config != Digest{} && states.ds_config != first.ds_config) {
      return Refuse(states.file, ": its ds_config differs from that of ", first.file,
                    "; two runs lie in one directory");
    }
  }
  return {};
}

}  // namespace

std::optional<uint32_t> Parsed::ExpertRanks(uint32_t mp, size_t group) const {
  const auto found = optimizers.find(RankKey{mp, 0});
  if (stage == 3 || found == optimizers.end()) return std::nullopt;
  const OptimizerStates& states = found->second;
  if (group >= states.groups.size() || !states.groups[group].experts) return std::nullopt;
  const auto& counts = states.partition_count;
  if (group >= counts.size() || counts[group] == 0) return 1;
  return static_cast<uint32_t>(dp / std::min<uint64_t>(counts[group], dp));
}

Result<Parsed> Parse(const TagFiles& files) {
  Parsed out;
  CKPT_RETURN_IF_ERROR(ReadModels(files, out));
  CKPT_RETURN_IF_ERROR(ReadOthers(files, out));
  CKPT_RETURN_IF_ERROR(SetDegrees(files, out));
  CKPT_RETURN_IF_ERROR(CheckAllRanks(files, out));
  CKPT_RETURN_IF_ERROR(CountExpertRanks(files, out));
  CKPT_RETURN_IF_ERROR(CheckOneRun(out));
  CKPT_RETURN_IF_ERROR(TakeShapesFromSlices(out));
  return out;
}

}  // namespace ckptfs::deepspeed::native
