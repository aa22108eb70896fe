// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/sharded.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/strings.h"
#include "core/state/model_config.h"

namespace ckptfs::deepspeed::native {
namespace {

constexpr size_t kNamesShown = 5;

// The layer of a pipeline name "L.rest".
std::optional<uint32_t> PipelineLayer(std::string_view name) {
  uint32_t layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool dotted = error == std::errc() && end < name.data() + name.size() && *end == '.';
  return dotted && layer < (1u << 20) ? std::optional(layer) : std::nullopt;
}

// Names under the reason why nothing says how they are spread.
using OpenNames = std::map<std::string, std::vector<std::string>>;

Error Uncovered(const OpenNames& open, uint32_t tp) {
  std::string list;
  for (const auto& [why, names] : open) {
    list += list.empty() ? "" : "; ";
    for (size_t i = 0; i < std::min(kNamesShown, names.size()); ++i) {
      list += StrCat(i == 0 ? "" : ", ", "'", names[i], "'");
    }
    list += StrCat(names.size() > kNamesShown ? StrCat(", ... (", names.size(), " in all)") : "",
                   ": ", why);
  }
  Error error{ErrorCode::kUnsupported, StrCat("nothing says how these are spread over the ", tp,
                                              " tensor-parallel ranks: ", list)};
  error.parameter = open.begin()->second.front();
  return std::move(error).Needing(
      "settle it with --family-set NAME=NUMBER (a size that a rule needs), --replicated REGEX, "
      "--averaged REGEX, or a rule of your own (--family FILE)");
}

// The shapes that the tensor-parallel ranks hold, which are the same on each pipeline stage.
Result<std::vector<Shape>> LocalShapes(const NamedParameter& parameter, uint32_t ranks) {
  std::vector<Shape> out;
  const auto& [first_stage, first] = *parameter.shapes.begin();
  for (uint32_t tp = 0; tp < ranks; ++tp) {
    if (!first[tp]) {
      return Fail(Error{ErrorCode::kInvalid, StrCat("tensor-parallel rank ", tp,
                                                    " does not have this parameter, but other "
                                                    "ranks do")}
                      .OfParameter(parameter.name));
    }
    out.push_back(*first[tp]);
  }
  for (const auto& [stage, shapes] : parameter.shapes) {
    if (shapes == first) continue;
    return Fail(Error{ErrorCode::kInvalid, StrCat("it has other shapes on pipeline "
                                                  "stage ",
                                                  stage, " than on ", first_stage)}
                    .OfParameter(parameter.name));
  }
  return out;
}

// Adds what the names of native experts and of a pipeline say beside the rules.
void AddWhatNamesSay(const NamedParameter& parameter, bool by_layer, Sharding& out,
                     uint32_t& layers) {
  if (parameter.expert) {
    out.expert = parameter.expert->number;
    out.expert_at = parameter.expert->at;
    if (out.pattern.kind == PatternKind::kUnknown) out.pattern.kind = PatternKind::kUnique;
  }
  // DeepSpeed itself keeps tied modules equal over the stages.
  const bool tied = parameter.name.starts_with("tied_modules.");
  out.on_several_stages = out.on_several_stages || tied;
  if (!by_layer) return;
  if (const auto layer = PipelineLayer(parameter.name)) {
    out.stage = StageRule::kLayer;
    out.layer = *layer;
    layers = std::max(layers, *layer + 1);
  } else if (tied) {
    out.stage = StageRule::kFirstLast;
  }
}

// A parameter that no rule places (a buffer, an adapter) stands where the rest of its
// pipeline layer does.
void FollowLayers(const Named& named, std::vector<Sharding>& shardings) {
  using Standing = std::pair<StageRule, std::optional<uint32_t>>;
  std::map<uint32_t, std::set<Standing>> standings;
  for (size_t i = 0; i < shardings.size(); ++i) {
    const auto layer = PipelineLayer(named.parameters[i].name);
    if (!layer || shardings[i].stage == StageRule::kEvery) continue;
    standings[*layer].emplace(shardings[i].stage, shardings[i].layer);
  }
  for (size_t i = 0; i < shardings.size(); ++i) {
    const auto layer = PipelineLayer(named.parameters[i].name);
    if (!layer || shardings[i].stage != StageRule::kEvery) continue;
    const auto found = standings.find(*layer);
    if (found == standings.end() || found->second.size() != 1) continue;
    std::tie(shardings[i].stage, shardings[i].layer) = *found->second.begin();
  }
}

}  // namespace

Result<Sharded> Shard(const TagFiles& files, const Parsed& parsed, const Named& named) {
  std::vector<NamedLocals> locals;
  for (const NamedParameter& parameter : named.parameters) {
    CKPT_ASSIGN_OR_RETURN(std::vector<Shape> shapes, LocalShapes(parameter, parsed.tp));
    locals.emplace_back(parameter.name, std::move(shapes));
  }
  const ModelStates& model = parsed.model(0);
  CKPT_ASSIGN_OR_RETURN(const ModelSizes sizes,
                        SizesOf(model.variables, files.options, files.step));
  CKPT_ASSIGN_OR_RETURN(
      ShardingRules rules,
      ShardingRules::Make(model.info ? &*model.info : nullptr, files.options, locals, sizes));
  Sharded out{std::move(rules), {}, 0, {}};
  OpenNames open;
  std::vector<std::string> assumed;
  bool by_layer = !files.names.layers.empty();
  for (size_t i = 0; i < locals.size(); ++i) {
    const auto& [name, shapes] = locals[i];
    const bool buffer = named.parameters[i].role == Role::kBuffer;
    CKPT_ASSIGN_OR_RETURN(auto sharding, out.rules.Resolve(name, shapes, buffer));
    if (!sharding && buffer) {
      assumed.push_back(name);
      sharding = ReplicatedSharding(shapes[0], parsed.tp);
    }
    if (!sharding) open[out.rules.WhyOpen(name)].push_back(name);
    by_layer = by_layer && !(sharding && sharding->layer);
    out.shardings.push_back(std::move(sharding).value_or(Sharding{}));
  }
  if (!open.empty()) return Fail(Uncovered(open, parsed.tp));
  if (!assumed.empty()) {
    out.notes.push_back(StrCat(
        assumed.size(), " buffers that no rule covers (", assumed[0],
        " ...) are taken to be equal on all tensor-parallel ranks; `ckptfs verify` compares them"));
  }
  if (!files.names.layers.empty()) FollowLayers(named, out.shardings);
  for (size_t i = 0; i < locals.size(); ++i) {
    AddWhatNamesSay(named.parameters[i], by_layer, out.shardings[i], out.layers);
  }
  return out;
}

}  // namespace ckptfs::deepspeed::native
