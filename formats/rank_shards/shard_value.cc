// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/shard_value.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::rank_shards {
namespace {

constexpr std::string_view kFromType = "torch._tensor._rebuild_from_type_v2";
constexpr std::string_view kWrapper = "torch._utils._rebuild_wrapper_subclass";

bool IsTorchClass(PickleRef value, std::string_view name) {
  const std::string full = value ? value.ClassName() : "";
  return full.starts_with("torch.distributed.") &&
         std::string_view(full).substr(full.rfind('.') + 1) == name;
}

// An attribute of a state: a dict, or a pair of dicts (__dict__ and __slots__).
PickleRef Attribute(PickleRef state, std::string_view name) {
  if (!state) return {};
  if (state.IsDict()) return state[name];
  for (size_t i = 0; state.IsSequence() && i < state.size(); ++i) {
    if (!state.at(i).IsDict()) continue;
    if (const PickleRef found = state.at(i)[name]) return found;
  }
  return {};
}

bool IsInside(const std::vector<uint64_t>& begin, const Shape& shape, const Shape& whole) {
  if (begin.size() != whole.size() || shape.size() != whole.size()) return false;
  for (size_t d = 0; d < whole.size(); ++d) {
    if (begin[d] > whole[d] || shape[d] > whole[d] - begin[d]) return false;
  }
  return true;
}

}  // namespace

Result<std::optional<ShardValue>> ShardReader::Read(PickleRef value) {
  using Maybe = std::optional<ShardValue>;
  if (!value) return Maybe();
  if (const TensorNode* plain = value.Tensor()) {
    CKPT_ASSIGN_OR_RETURN(FileTensor tensor, file_.Locate(*plain, blob_));
    ShardValue out{ShardValue::Form::kPlain, tensor.dtype(), tensor.shape(), {}};
    out.parts.push_back({std::vector<uint64_t>(tensor.shape().size(), 0), std::move(tensor)});
    return Maybe(std::move(out));
  }
  if (value.ClassName() != kFromType) {
    if (!value.IsOtherTensor()) return Maybe();
    return Refuse(
        "it is not a plain tensor (negated, conjugated, quantised, sparse, or a storage)");
  }
  const PickleRef call = value.Arguments();  // function, class, its arguments, state
  if (!call || call.size() != 4 || call.at(0).ClassName() != kWrapper) {
    return Refuse("it is a tensor of the class ", call ? call.at(1).ClassName() : "?",
                  ", whose elements are not understood");
  }
  const PickleRef made = call.at(2);  // class, dtype, size, stride, ...
  const PickleRef size = made ? made.at(2) : made;
  if (IsTorchClass(call.at(1), "DTensor")) {
    CKPT_ASSIGN_OR_RETURN(ShardValue out, ReadDTensor(size, call.at(3)));
    return Maybe(std::move(out));
  }
  if (IsTorchClass(call.at(1), "ShardedTensor")) {
    CKPT_ASSIGN_OR_RETURN(ShardValue out, ReadShardedTensor(size, call.at(3)));
    return Maybe(std::move(out));
  }
  return Refuse("it is a tensor of the class ", call.at(1).ClassName(),
                ", which is not understood");
}

Result<ShardValue> ShardReader::ReadDTensor(PickleRef size, PickleRef state) {
  const PickleRef local = Attribute(state, "_local_tensor");
  const PickleRef spec = Attribute(state, "_spec");
  const auto whole = size.AsShape();
  if (!local || !spec || !whole || !IsTorchClass(spec, "DTensorSpec")) {
    return Refuse("a DTensor without a local tensor, a spec or a size");
  }
  CKPT_RETURN_IF_ERROR(ElementCount(*whole));
  const PickleRef meta = spec["tensor_meta"].Arguments();  // a named tuple: shape, stride, dtype
  if (meta && meta.at(0).AsShape() != whole) {
    return Refuse("a DTensor of the size ", ShapeToString(*whole), " whose spec has another shape");
  }
  CKPT_ASSIGN_OR_RETURN(FileTensor tensor, FileTensorOf(local, file_, blob_, "_local_tensor"));
  const PickleRef mesh = spec["mesh"];
  if (!mesh) return Refuse("a DTensor without a device mesh");
  ShardValue out{ShardValue::Form::kMesh, tensor.dtype(), *whole, {}};
  auto known = meshes_.find(mesh.id());
  if (known == meshes_.end()) {
    CKPT_ASSIGN_OR_RETURN(PlacedMesh read, ReadMesh(mesh, file_, rank_));
    known = meshes_.emplace(mesh.id(), std::move(read)).first;
  }
  out.at = known->second;
  CKPT_ASSIGN_OR_RETURN(out.placements, ReadPlacements(spec));
  const std::vector<uint64_t>& places = out.at.mesh->shape;
  CKPT_ASSIGN_OR_RETURN(const CutOrder order, OrderOfCuts(out.placements, whole->size(), places));
  CKPT_RETURN_IF_ERROR(CheckOrder(spec, order));
  ShardBox box = BoxAt(*whole, order, places, out.at.coordinate);
  const bool nothing = tensor.elements() == 0 && std::ranges::find(box.shape, 0) != box.shape.end();
  if (tensor.shape() != box.shape && !nothing) {
    return Refuse("rank ", rank_, " holds ", ShapeToString(tensor.shape()), " of ",
                  ShapeToString(*whole), " where its placements give ", ShapeToString(box.shape));
  }
  out.parts.push_back({std::move(box.begin), std::move(tensor)});
  return out;
}

// torch/distributed/_shard/sharded_tensor/api.py, __getstate__: local shards, metadata, ...
Result<ShardValue> ShardReader::ReadShardedTensor(PickleRef size, PickleRef state) {
  const PickleRef shards = state && state.IsSequence() ? state.at(0) : PickleRef();
  const auto whole = size.AsShape();
  if (!shards || !shards.IsSequence() || !whole) {
    return Refuse("a ShardedTensor without local shards or a size");
  }
  CKPT_RETURN_IF_ERROR(ElementCount(*whole));
  const auto said = state.at(1)["size"].AsShape();
  if (said != whole) return Refuse("a ShardedTensor whose metadata has another size");
  ShardValue out{ShardValue::Form::kBoxes, DType::kF32, *whole, {}};
  for (size_t i = 0; i < shards.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(FileTensor tensor,
                          FileTensorOf(shards.at(i)["tensor"], file_, blob_, "a local shard"));
    const PickleRef metadata = shards.at(i)["metadata"];
    const auto begin = metadata["shard_offsets"].AsShape();
    const auto shape = metadata["shard_sizes"].AsShape();
    if (!begin || !shape || *shape != tensor.shape() || !IsInside(*begin, *shape, *whole)) {
      return Refuse("a local shard of a ShardedTensor that is not the box that its metadata says");
    }
    out.dtype = tensor.dtype();
    out.parts.push_back({*begin, std::move(tensor)});
  }
  return out;
}

}  // namespace ckptfs::rank_shards
