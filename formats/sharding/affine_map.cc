// SPDX-License-Identifier: Apache-2.0

#include "formats/sharding/affine_map.h"

#include <algorithm>
#include <cmath>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxRanks = 1 << 16;

template <class... Pieces>
tl::unexpected<Error> RefuseMap(const Pieces&... pieces) {
  return Fail(ErrorCode::kInvalid, StrCat("affine_map: ", pieces...));
}

// The name that re.escape made this pattern of; nothing for a real regex.
std::optional<std::string> LiteralName(std::string_view pattern) {
  constexpr std::string_view kSpecial = "()[]{}?*+-|^$.&~# \t\n\r\v\f\\";
  if (pattern.size() < 2 || pattern.front() != '^' || pattern.back() != '$') return std::nullopt;
  pattern = pattern.substr(1, pattern.size() - 2);
  std::string name;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '\\') {
      if (++i == pattern.size() || kSpecial.find(pattern[i]) == std::string_view::npos) {
        return std::nullopt;
      }
    } else if (kSpecial.find(pattern[i]) != std::string_view::npos && pattern[i] != '-') {
      return std::nullopt;
    }
    name += pattern[i];
  }
  return name;
}

struct StridedBlock {
  uint64_t offset = 0;
  std::vector<uint64_t> strides;
};

Result<StridedBlock> ParseBlock(PickleRef block, std::string_view what, size_t dims) {
  const auto offset = block.at(0).Int();
  const auto strides = block.at(1).AsShape();
  if (block.size() != 2 || !offset || *offset < 0 || !strides || strides->size() != dims) {
    return RefuseMap("a piece's '", what, "' is not [offset, ", dims, " strides]");
  }
  return StridedBlock{static_cast<uint64_t>(*offset), *strides};
}

// First index of the box in a tensor of `shape`, whose own strides the block
// must have along every dim longer than 1.
Result<std::vector<uint64_t>> BoxBegin(const Shape& full, const Shape& box,
                                       const StridedBlock& block) {
  const std::vector<uint64_t> strides = RowMajorStrides(full);
  std::vector<uint64_t> begin(full.size(), 0);
  uint64_t rest = block.offset;
  for (size_t d = 0; d < full.size(); ++d) {
    if (box[d] > 1 && block.strides[d] != strides[d]) {
      return RefuseMap("a piece has other strides than the full tensor");
    }
    begin[d] = strides[d] == 0 ? 0 : rest / strides[d];
    rest -= begin[d] * strides[d];
    if (!RangeInside(begin[d], box[d], full[d])) {
      return RefuseMap("a piece of ", ShapeToString(box),
                       " lies beyond the "
                       "full ",
                       ShapeToString(full));
    }
  }
  if (rest != 0) return RefuseMap("a piece begins outside the full tensor");
  return begin;
}

Result<Piece> ParsePiece(PickleRef ref, const Shape& full) {
  const auto shape = ref["shape"].AsShape();
  if (!shape || shape->size() != full.size()) {
    return RefuseMap("a piece's shape does not have the ", full.size(), " dims of the full tensor");
  }
  CKPT_ASSIGN_OR_RETURN(const StridedBlock source,
                        ParseBlock(ref["source"], "source", shape->size()));
  CKPT_ASSIGN_OR_RETURN(const StridedBlock dest, ParseBlock(ref["dest"], "dest", shape->size()));
  Piece piece;
  piece.shape = *shape;
  CKPT_ASSIGN_OR_RETURN(piece.atom_begin, BoxBegin(full, *shape, source));
  piece.local_offset = dest.offset;
  piece.local_strides = dest.strides;
  if (const PickleRef scale = ref["scale"]) {
    const auto value = scale.Number();
    if (!value || !std::isfinite(*value) || *value == 0)
      return RefuseMap("a scale is 0 or not a number");
    piece.scale = *value;
  }
  return piece;
}

Result<LocalTensor> ParseRank(PickleRef ref, const Shape& full) {
  LocalTensor local;
  const auto shape = ref["shard_shape"].AsShape();
  const PickleRef pieces = ref["pieces"];
  if (!shape || !pieces.IsSequence())
    return RefuseMap(
        "a rank does not have shard_shape or "
        "pieces");
  local.shape = *shape;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto box = pieces.at(i)["shape"].AsShape();
    // The range of a rank beyond the heads; it may lie anywhere.
    if (box && std::find(box->begin(), box->end(), 0) != box->end()) continue;
    CKPT_ASSIGN_OR_RETURN(Piece piece, ParsePiece(pieces.at(i), full));
    local.pieces.push_back(std::move(piece));
  }
  CKPT_RETURN_IF_ERROR(ValidateLocal(local, full));
  return local;
}

Result<AffineParameter> ParseParameter(PickleRef ref) {
  AffineParameter parameter;
  const auto shape = ref["logical_shape"].AsShape();
  const auto ranks = ref["ranks"].Items();
  if (!shape || ranks.empty() || ranks.size() > kMaxRanks) {
    return RefuseMap("logical_shape or ranks are missing");
  }
  CKPT_RETURN_IF_ERROR(ElementCount(*shape));
  parameter.logical_shape = *shape;
  parameter.ranks.resize(ranks.size());
  std::vector<bool> seen(ranks.size(), false);
  for (const auto& [key, value] : ranks) {
    const auto rank = key.Int();
    if (!rank || *rank < 0 || static_cast<size_t>(*rank) >= ranks.size() ||
        seen[static_cast<size_t>(*rank)]) {
      return RefuseMap("ranks are not numbered 0 to ", ranks.size() - 1);
    }
    seen[static_cast<size_t>(*rank)] = true;
    CKPT_ASSIGN_OR_RETURN(parameter.ranks[static_cast<size_t>(*rank)], ParseRank(value, *shape));
  }
  const LocalTensor& first = parameter.ranks.front();
  parameter.replicated = ranks.size() > 1 && first.pieces.size() == 1 &&
                         first.pieces[0].shape == *shape &&
                         std::all_of(parameter.ranks.begin(), parameter.ranks.end(),
                                     [&](const LocalTensor& other) { return other == first; });
  return parameter;
}

}  // namespace

Result<AffineMap> AffineMap::Parse(PickleRef info) {
  AffineMap result;
  if (!info) return result;
  const PickleRef map = info["affine_map"];
  if (!map || map.IsNone()) return result;
  const auto version = map["version"].Int();
  if (!version || *version != 1) {
    return Fail(ErrorCode::kUnsupported, "affine_map: only version 1 is understood");
  }
  for (const auto& [key, value] : map["params"].Items()) {
    const auto pattern = key.String();
    const auto name = pattern ? LiteralName(*pattern) : std::nullopt;
    if (!name) return RefuseMap("'", pattern.value_or("?"), "' is not ^ an escaped name $");
    auto parameter = ParseParameter(value);
    if (!parameter) return Fail(std::move(parameter).error().WithContext(*name));
    result.parameters_.emplace(*name, *std::move(parameter));
  }
  return result;
}

const AffineParameter* AffineMap::Find(std::string_view parameter) const {
  const auto at = parameters_.find(parameter);
  return at == parameters_.end() ? nullptr : &at->second;
}

}  // namespace ckptfs
