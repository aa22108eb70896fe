// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_cut.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs::deepspeed {
namespace {

using Kind = UniversalCut::Kind;

tl::unexpected<Error> Refusal(const Parameter& parameter, std::string reason) {
  return Fail(Error{ErrorCode::kUnsupported, std::move(reason)}.OfParameter(parameter.name));
}

Result<UniversalCut> CutAlong(const Parameter& parameter, const Cut& cut) {
  if (cut.pad_multiple > 0 || cut.pad_always) {
    if (cut.dim != 0 || cut.parts.size() > 1) {
      return Refusal(parameter, StrCat("it is padded along dim ", cut.dim,
                                       ", but the universal "
                                       "loader "
                                       "pads a whole dim 0 only"));
    }
    return UniversalCut{Kind::kVocabulary, 0, {}};
  }
  if (cut.parts.size() < 2) return UniversalCut{Kind::kAlong, cut.dim, {}};
  const bool equal = std::all_of(cut.parts.begin(), cut.parts.end(),
                                 [&](uint64_t part) { return part == cut.parts[0]; });
  return UniversalCut{equal ? Kind::kEqualParts : Kind::kParts, cut.dim, cut.parts};
}

NodeId SubparamShapeNode(const UniversalCut& cut, const Shape& shape, PickleBuilder& builder) {
  std::vector<NodeId> dims;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d != cut.dim) {
      dims.push_back(builder.Int(static_cast<int64_t>(shape[d])));
      continue;
    }
    std::vector<NodeId> parts;
    for (uint64_t part : cut.parts) parts.push_back(builder.Int(static_cast<int64_t>(part)));
    dims.push_back(builder.Tuple(std::move(parts)));
  }
  const NodeId state = builder.Dict({
      {builder.String("patterns"), builder.List({})},
      {builder.String("shape"), builder.Tuple(std::move(dims))},
      {builder.String("partition_dim"), builder.Int(cut.dim)},
  });
  return builder.Object(
      builder.Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
      builder.Tuple({}), state);
}

}  // namespace

Result<UniversalCut> CutOf(const Parameter& parameter) {
  // Along which dim is known even where in what units is not; engines that cut
  // evenly anyway then cut there.
  const bool own = parameter.pattern.kind == PatternKind::kUnknown && parameter.source_pattern;
  const Pattern& pattern = own ? *parameter.source_pattern : parameter.pattern;
  if (pattern.bias_scaled) {
    return Refusal(parameter,
                   "it is stored divided by the tensor-parallel degree, but the "
                   "universal "
                   "loader cannot divide");
  }
  switch (pattern.kind) {
    case PatternKind::kUnknown: return UniversalCut{};
    case PatternKind::kUnique:
    case PatternKind::kReplicate:
    case PatternKind::kPartial: return UniversalCut{Kind::kReplicated, 0, {}};
    case PatternKind::kShard: break;
  }
  if (pattern.cuts.size() != 1) {
    return Refusal(parameter,
                   "it is cut along several dims, but the universal loader cuts "
                   "along one");
  }
  return CutAlong(parameter, pattern.cuts[0]);
}

PickleItems CutKeys(const UniversalCut& cut, const Shape& shape, PickleBuilder& builder) {
  PickleItems items;
  const auto add = [&](std::string_view key, NodeId value) {
    items.emplace_back(builder.String(key), value);
  };
  switch (cut.kind) {
    case Kind::kUnknown:
    case Kind::kReplicated: break;
    case Kind::kAlong: add("cat_dim", builder.Int(cut.dim)); break;
    case Kind::kVocabulary:
      add("cat_dim", builder.Int(0));
      add("vocab_tensor", builder.Bool(true));
      break;
    case Kind::kEqualParts:
      add("cat_dim", builder.Int(cut.dim));
      add("param_n_sub_params", builder.Int(static_cast<int64_t>(cut.parts.size())));
      break;
    case Kind::kParts: add("sub_param_shape", SubparamShapeNode(cut, shape, builder)); break;
  }
  return items;
}

PickleItems KeysOfNumber(PickleBuilder& builder) {
  const UniversalCut one{Kind::kParts, 0, {1}};
  const NodeId key = builder.String("sub_param_shape");
  return {{key, SubparamShapeNode(one, {1}, builder)}};
}

}  // namespace ckptfs::deepspeed
