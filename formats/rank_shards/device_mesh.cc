// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/device_mesh.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::rank_shards {
namespace {

using Numbers = std::vector<uint64_t>;

std::optional<Numbers> NumbersOf(PickleRef value) {
  if (const auto one = value.Int()) {
    return *one >= 0 ? std::optional(Numbers{static_cast<uint64_t>(*one)}) : std::nullopt;
  }
  if (!value || !value.IsSequence() || value.size() > kMaxRanks) return std::nullopt;
  Numbers out;
  for (size_t i = 0; i < value.size(); ++i) {
    const auto number = value.at(i).Int();
    if (!number || *number < 0) return std::nullopt;
    out.push_back(static_cast<uint64_t>(*number));
  }
  return out;
}

// The numbers in a little-endian storage.
std::vector<int64_t> NumbersIn(const std::string& bytes, size_t width) {
  std::vector<int64_t> out;
  for (size_t at = 0; at + width <= bytes.size(); at += width) {
    int32_t narrow = 0;
    int64_t number = 0;
    if (width == sizeof(narrow)) {
      std::memcpy(&narrow, bytes.data() + at, width);
      number = narrow;
    } else {
      std::memcpy(&number, bytes.data() + at, width);
    }
    out.push_back(number);
  }
  return out;
}

// The elements of an integer tensor, row-major.  A part of a mesh is a view of the whole mesh's
// storage, with strides.
Result<Numbers> ReadNumbers(PickleRef value, const TorchFile& file) {
  const TensorNode* const node = value ? value.Tensor() : nullptr;
  if (node == nullptr || (node->dtype != DType::kI32 && node->dtype != DType::kI64)) {
    return Refuse("a device mesh whose ranks are not a tensor of integers");
  }
  CKPT_ASSIGN_OR_RETURN(const FileTensor tensor, file.Locate(*node, BlobIndex{}));
  if (tensor.elements() > kMaxRanks || node->storage_elements > kMaxRanks) {
    return Refuse("a device mesh of more than ", kMaxRanks, " ranks");
  }
  if (tensor.elements() == 0) return Refuse("a device mesh without ranks");
  TensorNode storage = *node;
  storage.storage_offset = 0;
  storage.shape = {node->storage_elements};
  storage.strides = {1};
  CKPT_ASSIGN_OR_RETURN(const FileTensor all, file.Locate(storage, BlobIndex{}));
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, file.Read(all));
  const std::vector<int64_t> numbers = NumbersIn(bytes, ByteWidth(node->dtype));
  std::vector<uint64_t> places{node->storage_offset};  // Locate has seen that all are inside
  for (size_t d = 0; d < node->shape.size(); ++d) {
    std::vector<uint64_t> finer;
    for (const uint64_t place : places) {
      for (uint64_t i = 0; i < node->shape[d]; ++i) finer.push_back(place + i * node->strides[d]);
    }
    places = std::move(finer);
  }
  Numbers out;
  for (const uint64_t place : places) {
    if (place >= numbers.size() || numbers[place] < 0) {
      return Refuse("a device mesh has a rank below 0");
    }
    out.push_back(static_cast<uint64_t>(numbers[place]));
  }
  return out;
}

// One axis of a layout: where its steps lie in the map, first to last.
std::optional<Numbers> OffsetsOf(PickleRef axis) {
  const auto sizes = NumbersOf(axis["shape"]);
  const auto strides = NumbersOf(axis["stride"]);
  if (!sizes || !strides || sizes->size() != strides->size()) return std::nullopt;
  Numbers offsets{0};
  for (size_t k = 0; k < sizes->size(); ++k) {
    const uint64_t size = (*sizes)[k], stride = (*strides)[k];
    if (size == 0 || size > kMaxRanks || stride > kMaxRanks || offsets.size() * size > kMaxRanks) {
      return std::nullopt;
    }
    Numbers finer;
    for (const uint64_t offset : offsets) {
      for (uint64_t i = 0; i < size; ++i) finer.push_back(offset + i * stride);
    }
    offsets = std::move(finer);
  }
  return offsets;
}

// A layout's axes; before 2.13 it was one tuple of sizes, and one of strides.
std::optional<std::vector<Numbers>> AxesOf(PickleRef layout) {
  std::vector<Numbers> out;
  if (const PickleRef axes = layout["axes"]) {
    if (!axes.IsSequence() || axes.size() > kMaxMeshDims) return std::nullopt;
    for (size_t i = 0; i < axes.size(); ++i) {
      auto offsets = OffsetsOf(axes.at(i));
      if (!offsets) return std::nullopt;
      out.push_back(*std::move(offsets));
    }
    return out;
  }
  const auto sizes = NumbersOf(layout["shape"]);
  const auto strides = NumbersOf(layout["stride"]);
  if (!sizes || !strides || sizes->size() != strides->size() || sizes->size() > kMaxMeshDims) {
    return std::nullopt;
  }
  for (size_t k = 0; k < sizes->size(); ++k) {
    if ((*sizes)[k] > kMaxRanks || (*strides)[k] > kMaxRanks) return std::nullopt;
    Numbers offsets;
    for (uint64_t i = 0; i < (*sizes)[k]; ++i) offsets.push_back(i * (*strides)[k]);
    out.push_back(std::move(offsets));
  }
  return out;
}

// The steps of all axes together, row-major.  Nothing above kMaxRanks of them.
std::optional<Numbers> Together(const std::vector<Numbers>& axes) {
  Numbers out{0};
  for (const Numbers& axis : axes) {
    if (out.size() * axis.size() > kMaxRanks) return std::nullopt;
    Numbers finer;
    for (const uint64_t offset : out) {
      for (const uint64_t step : axis) finer.push_back(offset + step);
    }
    out = std::move(finer);
  }
  return out;
}

Result<Mesh> MeshOfTensor(PickleRef tensor, const TorchFile& file) {
  Mesh out;
  CKPT_ASSIGN_OR_RETURN(out.ranks, ReadNumbers(tensor, file));
  out.shape = tensor.Tensor()->shape;
  if (out.shape.size() > kMaxMeshDims) return Refuse("a device mesh of too many dimensions");
  return out;
}

// The part of the whole mesh in which the rank is, at the place that it says.
Result<Mesh> MeshOfLayout(PickleRef mesh, const TorchFile& file, uint64_t rank) {
  const auto axes = AxesOf(mesh["_layout"]);
  const auto steps = axes ? Together(*axes) : std::nullopt;
  if (!steps || steps->empty()) return Refuse("a device mesh whose layout is not understood");
  CKPT_ASSIGN_OR_RETURN(const Numbers map, ReadNumbers(mesh["_rank_map"], file));
  const auto coordinate = NumbersOf(mesh["_coordinate_on_dim"]);
  if (!coordinate || coordinate->size() != axes->size()) {
    return Refuse("a device mesh that does not say its rank's place");
  }
  uint64_t own = 0;
  for (size_t d = 0; d < axes->size(); ++d) {
    if ((*coordinate)[d] >= (*axes)[d].size())
      return Refuse("a device mesh whose place is outside");
    own += (*axes)[d][(*coordinate)[d]];
  }
  const auto at = static_cast<uint64_t>(std::ranges::find(map, rank) - map.begin());
  if (at == map.size() || at < own)
    return Refuse("a device mesh in which rank ", rank, " is not at its place");
  Mesh out;
  for (const Numbers& axis : *axes) out.shape.push_back(axis.size());
  for (const uint64_t step : *steps) {
    if (at - own + step >= map.size()) return Refuse("a device mesh that leads beyond its ranks");
    out.ranks.push_back(map[at - own + step]);
  }
  return out;
}

}  // namespace

Result<PlacedMesh> ReadMesh(PickleRef mesh, const TorchFile& file, uint64_t rank) {
  if (!mesh.ClassName().starts_with("torch.distributed.") ||
      !mesh.ClassName().ends_with(".DeviceMesh")) {
    return Refuse("its mesh is not a DeviceMesh");
  }
  const PickleRef own = mesh["_rank"];
  if (own.Int() && static_cast<uint64_t>(*own.Int()) != rank) {
    return Refuse("rank ", *own.Int(), " of the job wrote this file, but its name says rank ",
                  rank);
  }
  const bool by_tensor = static_cast<bool>(mesh["mesh"]);
  CKPT_ASSIGN_OR_RETURN(
      Mesh read, by_tensor ? MeshOfTensor(mesh["mesh"], file) : MeshOfLayout(mesh, file, rank));
  const std::set<uint64_t> distinct(read.ranks.begin(), read.ranks.end());
  if (distinct.size() != read.ranks.size()) return Refuse("a device mesh has a rank twice");
  const auto found = std::ranges::find(read.ranks, rank);
  if (found == read.ranks.end()) {
    return Refuse("a device mesh in which the file's own rank ", rank, " is not");
  }
  PlacedMesh out;
  out.coordinate.resize(read.shape.size());
  auto rest = static_cast<uint64_t>(found - read.ranks.begin());
  for (size_t d = read.shape.size(); d-- > 0; rest /= read.shape[d]) {
    out.coordinate[d] = rest % read.shape[d];
  }
  const auto said = NumbersOf(mesh["_coordinate_on_dim"]);
  if (said && *said != out.coordinate) {
    return Refuse("the file of rank ", rank,
                  " says another place in its device mesh than the mesh does");
  }
  out.mesh = std::make_shared<const Mesh>(std::move(read));
  return out;
}

}  // namespace ckptfs::rank_shards
