// SPDX-License-Identifier: Apache-2.0

#include "formats/sharding/sharding_info.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

Status ReadPatterns(PickleRef info, std::string_view key, std::vector<NamePattern>& out) {
  const PickleRef list = info[key];
  if (!list || list.IsNone()) return {};
  if (!list.IsSequence()) return Fail(ErrorCode::kInvalid, StrCat("'", key, "' is not a list"));
  for (size_t i = 0; i < list.size(); ++i) {
    const auto text = list.at(i).String();
    if (!text) return Fail(ErrorCode::kInvalid, StrCat("'", key, "' holds no text"));
    CKPT_ASSIGN_OR_RETURN(NamePattern pattern, NamePattern::Parse(*text));
    out.push_back(std::move(pattern));
  }
  return {};
}

Status ReadCount(PickleRef info, std::string_view key, std::optional<uint64_t>& out) {
  const PickleRef value = info[key];
  if (!value || value.IsNone()) return {};
  const auto number = value.Int();
  if (!number || *number < 0) {
    return Fail(ErrorCode::kInvalid, StrCat("'", key, "' is not a count"));
  }
  out = static_cast<uint64_t>(*number);
  return {};
}

// SubparamShape may be a dict or (in a converted directory) an object.
Result<InfoSubParams> ReadSubParams(PickleRef entry) {
  InfoSubParams out;
  CKPT_RETURN_IF_ERROR(ReadPatterns(entry, "patterns", out.patterns));
  const auto dim = entry["partition_dim"].Int();
  const PickleRef shape = entry["shape"];
  if (!dim || *dim < 0 || !shape || !shape.IsSequence() ||
      static_cast<uint64_t>(*dim) >= shape.size()) {
    return Fail(ErrorCode::kInvalid, "'parameter_with_sub_params': no 'shape' or 'partition_dim'");
  }
  out.dim = static_cast<uint32_t>(*dim);
  const PickleRef cut = shape.at(static_cast<size_t>(*dim));
  if (const auto sizes = cut.AsShape()) {
    out.sizes = *sizes;
  } else if (const auto count = cut.Int(); count && *count > 0) {
    out.count = static_cast<uint64_t>(*count);
  } else {
    return Fail(ErrorCode::kInvalid, "'parameter_with_sub_params': sizes are not counts");
  }
  return out;
}

Status ReadWidths(PickleRef info, ShardingInfo& out) {
  const PickleRef widths = info["sub_param_shard_widths"];
  if (!widths || !widths.IsDict()) return {};
  for (const auto& [key, value] : widths.Items()) {
    const auto text = key.String();
    std::vector<std::vector<uint64_t>> parts;
    for (size_t i = 0; value.IsSequence() && i < value.size(); ++i) {
      const auto ranks = value.at(i).AsShape();
      if (!ranks) return Fail(ErrorCode::kInvalid, "'sub_param_shard_widths' holds no counts");
      parts.push_back(*ranks);
    }
    if (text) out.widths.emplace(*text, std::move(parts));
  }
  return {};
}

Status ReadUnsupported(PickleRef info, ShardingInfo& out) {
  const PickleRef entries = info["autotp_unsupported_parameter_patterns"];
  out.autotp = static_cast<bool>(entries);
  if (!entries || entries.IsNone()) return {};
  if (!entries.IsDict()) {
    std::vector<NamePattern> patterns;
    CKPT_RETURN_IF_ERROR(ReadPatterns(info, "autotp_unsupported_parameter_patterns", patterns));
    for (NamePattern& pattern : patterns) out.unsupported.emplace_back(std::move(pattern), "");
    return {};
  }
  for (const auto& [key, value] : entries.Items()) {
    CKPT_ASSIGN_OR_RETURN(NamePattern pattern, NamePattern::Parse(key.String().value_or("")));
    out.unsupported.emplace_back(std::move(pattern), std::string(value.String().value_or("")));
  }
  return {};
}

Result<ShardingInfo> Parse(PickleRef info) {
  ShardingInfo out;
  out.version = info["universal_checkpoint_version"].Number().value_or(0);
  const std::pair<std::string_view, std::vector<NamePattern>*> lists[] = {
      {"tp_replicated_parameter_patterns", &out.replicated},
      {"parameter_to_average_patterns", &out.averaged},
      {"parameter_with_row_parallelism_patterns", &out.row},
      {"vocabulary_parameter_patterns", &out.vocabulary},
      {"parameter_with_2_sub_params_cat_dim_0", &out.two_parts},
      {"pipeline_replicated_parameter_patterns", &out.pipeline_replicated},
      {"expert_parameter_patterns", &out.experts}};
  for (const auto& [key, list] : lists) CKPT_RETURN_IF_ERROR(ReadPatterns(info, key, *list));
  const PickleRef sub = info["parameter_with_sub_params"];
  for (size_t i = 0; sub && sub.IsSequence() && i < sub.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(InfoSubParams entry, ReadSubParams(sub.at(i)));
    out.sub_params.push_back(std::move(entry));
  }
  out.lists = info["tp_replicated_parameter_patterns"] && sub &&
              info["parameter_with_row_parallelism_patterns"];
  CKPT_RETURN_IF_ERROR(ReadWidths(info, out));
  CKPT_RETURN_IF_ERROR(ReadUnsupported(info, out));
  CKPT_ASSIGN_OR_RETURN(out.affine, AffineMap::Parse(info));
  CKPT_RETURN_IF_ERROR(ReadCount(info, "original_vocab_size", out.original_vocabulary));
  CKPT_RETURN_IF_ERROR(ReadCount(info, "padded_vocab_size", out.padded_vocabulary));
  return out;
}

}  // namespace

bool ShardingInfo::DeclaresTensorParallel() const {
  return !replicated.empty() || !averaged.empty() || !row.empty() || !two_parts.empty() ||
         !sub_params.empty();
}

Result<ShardingInfo> ParseShardingInfo(PickleRef info) {
  auto out = Parse(info);
  if (!out) return Fail(std::move(out).error().WithContext("universal_checkpoint_info"));
  return out;
}

const NamePattern* FirstMatch(const std::vector<NamePattern>& patterns, std::string_view name) {
  const auto found =
      std::find_if(patterns.begin(), patterns.end(),
                   [name](const NamePattern& pattern) { return pattern.MatchesPrefix(name); });
  return found == patterns.end() ? nullptr : &*found;
}

}  // namespace ckptfs
