// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/placements.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/rank_shards/device_mesh.h"

namespace ckptfs::rank_shards {
namespace {

// The class of a placement without its module, which moved between releases.
std::string_view PlacementClass(std::string_view name) {
  if (!name.starts_with("torch.distributed.")) return {};
  return name.substr(name.rfind('.') + 1);
}

Result<Placement> ReadPlacement(PickleRef value) {
  const std::string name = value.ClassName();
  const std::string_view kind = PlacementClass(name);
  if (kind == "Replicate") return Placement{};
  const bool strided = kind == "_StridedShard";
  if (kind != "Shard" && !strided) {
    return Refuse("its placement is a ", name.empty() ? "value without a class" : name,
                  ", which is neither Shard nor Replicate");
  }
  const auto dim = value["dim"].Int();
  const auto factor = strided ? value["split_factor"].Int() : std::optional<int64_t>(1);
  if (!dim || *dim < 0 || !factor || *factor < 1) {
    return Refuse("its ", kind, " does not say its dim and factor");
  }
  return Placement{static_cast<uint64_t>(*dim), static_cast<uint64_t>(*factor)};
}

}  // namespace

Result<std::vector<Placement>> ReadPlacements(PickleRef spec) {
  const PickleRef list = spec["placements"];
  if (!list || !list.IsSequence() || list.size() > kMaxMeshDims) {
    return Refuse("a DTensor without placements");
  }
  std::vector<Placement> out;
  for (size_t i = 0; i < list.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(const Placement one, ReadPlacement(list.at(i)));
    out.push_back(one);
  }
  return out;
}

Result<CutOrder> OrderOfCuts(const std::vector<Placement>& placements, size_t dims,
                             const std::vector<uint64_t>& mesh) {
  if (placements.size() != mesh.size()) {
    return Refuse("it has ", placements.size(), " placements on a mesh of ", mesh.size(), " dims");
  }
  CutOrder out(dims);
  for (size_t m = mesh.size(); m-- > 0;) {
    if (!placements[m].dim) continue;
    if (*placements[m].dim >= dims) {
      return Refuse("its placement cuts dim ", *placements[m].dim, " of ", dims);
    }
    std::vector<size_t>& order = out[*placements[m].dim];
    size_t behind = 0;
    uint64_t parts = 1;  // at most the ranks of the mesh
    while (parts < placements[m].factor && behind < order.size()) parts *= mesh[order[behind++]];
    if (parts != placements[m].factor) {
      return Refuse("its _StridedShard has split_factor ", placements[m].factor,
                    ", which the mesh dims to its right do not give");
    }
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(behind), m);
  }
  return out;
}

Status CheckOrder(PickleRef spec, const CutOrder& order) {
  const PickleRef said = spec["shard_order"];
  if (!said || said.IsNone()) return {};
  for (size_t i = 0; i < said.size(); ++i) {
    // A named tuple: its arguments are its fields.
    const PickleRef entry = said.at(i).IsSequence() ? said.at(i) : said.at(i).Arguments();
    const auto dim = entry.at(0).Int();
    const auto mesh_dims = entry.at(1).AsShape();
    const bool known = dim && mesh_dims && *dim >= 0 && static_cast<size_t>(*dim) < order.size();
    if (known && std::ranges::equal(*mesh_dims, order[static_cast<size_t>(*dim)])) continue;
    return Refuse("its shard_order is not that of its placements");
  }
  return {};
}

ShardBox BoxAt(const Shape& whole, const CutOrder& order, const std::vector<uint64_t>& mesh,
               const std::vector<uint64_t>& coordinate) {
  ShardBox box{std::vector<uint64_t>(whole.size(), 0), whole};
  for (size_t d = 0; d < whole.size(); ++d) {
    for (const size_t m : order[d]) {
      const uint64_t size = box.shape[d];
      const uint64_t step = CeilDiv(size, mesh[m]);
      const uint64_t begin =
          step == 0 || coordinate[m] >= CeilDiv(size, step) ? size : step * coordinate[m];
      box.begin[d] += begin;
      box.shape[d] = std::min(step, size - begin);
    }
  }
  return box;
}

}  // namespace ckptfs::rank_shards
