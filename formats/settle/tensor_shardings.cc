// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/tensor_shardings.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kNamesShown = 5;

// Names under the reason why nothing says how they are spread.
using OpenNames = std::map<std::string, std::vector<std::string>>;

Error Uncovered(const OpenNames& open, size_t ranks) {
  std::string list;
  for (const auto& [why, names] : open) {
    list += list.empty() ? "" : "; ";
    for (size_t i = 0; i < std::min(kNamesShown, names.size()); ++i) {
      list += StrCat(i == 0 ? "" : ", ", "'", names[i], "'");
    }
    list += StrCat(names.size() > kNamesShown ? StrCat(", ... (", names.size(), " in all)") : "",
                   ": ", why);
  }
  Error error{ErrorCode::kUnsupported, StrCat("nothing says how these are spread over the ", ranks,
                                              " tensor-parallel ranks: ", list)};
  error.parameter = open.begin()->second.front();
  return std::move(error).Needing(
      "settle it with --family-set NAME=NUMBER (a size that a rule needs), --replicated REGEX, "
      "--averaged REGEX, or a rule of your own (--family FILE)");
}

// A tensor that no rule places (a buffer, an adapter) stands where the rest of its
// pipeline layer does.
void FollowLayers(const StateDict& dict, std::vector<Sharding>& shardings) {
  using Standing = std::pair<StageRule, std::optional<uint32_t>>;
  std::map<uint32_t, std::set<Standing>> standings;
  for (size_t i = 0; i < shardings.size(); ++i) {
    const auto layer = dict.tensors[i].layer;
    if (!layer || shardings[i].stage == StageRule::kEvery) continue;
    standings[*layer].emplace(shardings[i].stage, shardings[i].layer);
  }
  for (size_t i = 0; i < shardings.size(); ++i) {
    const auto layer = dict.tensors[i].layer;
    if (!layer || shardings[i].stage != StageRule::kEvery) continue;
    const auto found = standings.find(*layer);
    if (found == standings.end() || found->second.size() != 1) continue;
    std::tie(shardings[i].stage, shardings[i].layer) = *found->second.begin();
  }
}

// Without a rule's layer the source's own pipeline is the order.
void PlaceInPipeline(const StateDict& dict, std::vector<Sharding>& shardings, StepModel& header) {
  const bool has_layers = std::ranges::any_of(
      dict.tensors, [](const StateDict::Tensor& tensor) { return tensor.layer.has_value(); });
  if (!has_layers) return;
  const bool ruled = std::ranges::any_of(
      shardings, [](const Sharding& sharding) { return sharding.layer.has_value(); });
  FollowLayers(dict, shardings);
  for (size_t i = 0; i < shardings.size() && !ruled; ++i) {
    const StateDict::Tensor& tensor = dict.tensors[i];
    if (tensor.layer) {
      shardings[i].stage = StageRule::kLayer;
      shardings[i].layer = *tensor.layer;
      header.layers = std::max(header.layers, *tensor.layer + 1);
    } else if (tensor.tied) {
      shardings[i].stage = StageRule::kFirstLast;
    }
  }
}

// Adds what the format says beside the rules.
Status AddWhatSourceSays(const StateDict::Tensor& tensor, const Layout& source, Sharding& out) {
  if (tensor.packed && out.pattern.kind == PatternKind::kShard) out.pattern = Pattern{};
  if (tensor.pattern && out.pattern.kind == PatternKind::kUnknown) out.pattern = *tensor.pattern;
  out.on_several_stages = out.on_several_stages || tensor.tied;
  if (tensor.expert) {  // whatever the family calls it
    out.expert = tensor.expert->number;
    out.expert_at = tensor.expert->at;
  }
  // Views of native MoE join the experts of several ranks under the name of one;
  // which belongs to which rank is not in the file.
  if (out.expert && tensor.stacked_experts > 0) {
    return Fail(
        Error{ErrorCode::kUnsupported, "one tensor holds experts of several expert-parallel ranks"}
            .OfParameter(tensor.name)
            .Needing("adopt the original checkpoint, or a view of it without ep in its "
                     "layout"));
  }
  out.stacked_experts = std::max(out.stacked_experts, tensor.stacked_experts);
  // A tp degree that the source does not have is shown as any other.
  if (!tensor.ranks.empty() && tensor.ranks.size() != source.tp) out.source_pattern.reset();
  return {};
}

}  // namespace

Result<std::vector<Sharding>> ShardingsOf(const StateDict& dict, std::span<const Role> roles,
                                          const SourceOptions& options, StepModel& header) {
  std::vector<NamedLocals> locals;
  locals.reserve(dict.tensors.size());
  for (const auto& tensor : dict.tensors) {
    locals.emplace_back(tensor.name,
                        tensor.ranks.empty() ? std::vector<Shape>{tensor.shape} : tensor.ranks);
  }
  CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                        ShardingRules::Make(dict.cuts, options, locals, dict.sizes));
  std::vector<Sharding> out;
  OpenNames open;
  size_t open_ranks = 0;
  std::vector<std::string> assumed;
  for (size_t i = 0; i < locals.size(); ++i) {
    const auto& [name, shapes] = locals[i];
    const bool buffer = roles[i] == Role::kBuffer;
    CKPT_ASSIGN_OR_RETURN(auto sharding, rules.Resolve(name, shapes, buffer));
    if (!sharding && buffer) {
      assumed.push_back(name);
      sharding = ReplicatedSharding(shapes[0], static_cast<uint32_t>(shapes.size()));
    }
    if (!sharding) {
      open[rules.WhyOpen(name)].push_back(name);
      open_ranks = shapes.size();
    }
    out.push_back(std::move(sharding).value_or(Sharding{}));
  }
  if (!open.empty()) return Fail(Uncovered(open, open_ranks));
  rules.Describe(header);
  if (!assumed.empty()) {
    header.notes.push_back(StrCat(
        assumed.size(), " buffers that no rule covers (", assumed[0],
        " ...) are taken to be equal on all tensor-parallel ranks; `ckptfs verify` compares them"));
  }
  PlaceInPipeline(dict, out, header);
  for (size_t i = 0; i < out.size(); ++i) {
    CKPT_RETURN_IF_ERROR(AddWhatSourceSays(dict.tensors[i], header.layout, out[i]));
  }
  return out;
}

}  // namespace ckptfs
