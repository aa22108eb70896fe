// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/mesh_cut.h"

#include "core/base/checked_math.h"

namespace ckptfs::dcp {
namespace {

// Rows along dim 0, of which a tensor without dims has one.
uint64_t Rows(const Shape& shape) { return shape.empty() ? 1 : shape[0]; }

}  // namespace

// Nothing at all is one chunk that is empty, so that every tensor has a box.
TorchChunks::TorchChunks(uint64_t the_size, uint64_t parts)
    : size(the_size),
      step(CeilDiv(the_size, parts)),
      count(the_size == 0 ? 1 : CeilDiv(the_size, step)) {}

MeshCut::MeshCut(const Shape& shape, std::optional<uint32_t> tp_dim, const Mesh& mesh)
    : shape_(shape),
      tp_dim_(tp_dim),
      tp_(mesh.tp),
      tp_parts_(tp_dim ? shape[*tp_dim] : 1, tp_dim ? mesh.tp : 1),
      full_rows_(tp_dim == 0 ? tp_parts_.length(0) : Rows(shape), mesh.shards),
      last_rows_(tp_dim == 0 ? tp_parts_.length(tp_parts_.count - 1) : Rows(shape), mesh.shards) {}

MeshCut::Place MeshCut::PlaceOf(uint64_t i) const {
  const uint64_t before_last = (tp_parts_.count - 1) * full_rows_.count;
  if (i >= before_last) return {tp_parts_.count - 1, i - before_last};
  return {i / full_rows_.count, i % full_rows_.count};
}

MeshCut::Box MeshCut::At(uint64_t i) const {
  const Place place = PlaceOf(i);
  Box box{Shape(shape_.size(), 0), shape_, place.shard * tp_ + place.tp_rank};
  if (tp_dim_) {
    box.begin[*tp_dim_] = tp_parts_.begin(place.tp_rank);
    box.shape[*tp_dim_] = tp_parts_.length(place.tp_rank);
  }
  if (!shape_.empty()) {
    const TorchChunks& rows = RowsOf(place.tp_rank);
    box.begin[0] += rows.begin(place.shard);
    box.shape[0] = rows.length(place.shard);
  }
  return box;
}

std::optional<uint64_t> MeshCut::IndexOf(uint64_t rank) const {
  const uint64_t tp_rank = rank % tp_;
  const uint64_t shard = rank / tp_;
  if (tp_rank >= tp_parts_.count || shard >= RowsOf(tp_rank).count) return std::nullopt;
  return tp_rank * full_rows_.count + shard;
}

uint32_t MeshCut::KindOf(uint64_t i) const {
  const Place place = PlaceOf(i);
  const bool last_part = place.tp_rank + 1 == tp_parts_.count;
  const bool last_rows = place.shard + 1 == RowsOf(place.tp_rank).count;
  return (last_part ? 2 : 0) + (last_rows ? 1 : 0);
}

std::array<std::optional<uint64_t>, MeshCut::kKinds> MeshCut::Samples() const {
  std::array<std::optional<uint64_t>, kKinds> samples;
  const uint64_t before_last = (tp_parts_.count - 1) * full_rows_.count;
  if (before_last > 0) {
    if (full_rows_.count > 1) samples[0] = 0;
    samples[1] = full_rows_.count - 1;
  }
  if (last_rows_.count > 1) samples[2] = before_last;
  samples[3] = before_last + last_rows_.count - 1;
  return samples;
}

}  // namespace ckptfs::dcp
