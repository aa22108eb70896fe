// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/shard_set.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::rank_shards {
namespace {

std::string FormName(ShardValue::Form form) {
  switch (form) {
    case ShardValue::Form::kPlain: return "a plain tensor";
    case ShardValue::Form::kMesh: return "a DTensor";
    case ShardValue::Form::kBoxes: return "a ShardedTensor";
  }
  return "";
}

std::string Described(const ShardValue& value) {
  return StrCat(FormName(value.form), " of ", DTypeName(value.dtype), " ",
                ShapeToString(value.whole));
}

// The place along the mesh dims that do not cut the tensor.
std::vector<uint64_t> ReplicaOf(const ShardValue& value) {
  std::vector<uint64_t> out;
  for (size_t m = 0; m < value.placements.size(); ++m) {
    if (!value.placements[m].dim) out.push_back(value.at.coordinate[m]);
  }
  return out;
}

bool IsEmpty(const ShardValue::Part& part) { return part.tensor.elements() == 0; }

}  // namespace

Result<ShardSet> ShardSet::Make(std::vector<ShardValue> by_rank) {
  ShardSet out;
  const ShardValue& first = by_rank.front();
  out.dtype_ = first.dtype;
  out.shape_ = first.whole;
  out.form_ = first.form;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const ShardValue& other = by_rank[rank];
    const bool typed = other.parts.empty() || first.parts.empty() || other.dtype == first.dtype;
    if (other.form == first.form && other.whole == first.whole && typed) {
      if (first.parts.empty()) out.dtype_ = other.dtype;
      continue;
    }
    return Refuse("rank 0 has ", Described(first), ", rank ", rank, " ", Described(other));
  }
  switch (out.form_) {
    case ShardValue::Form::kPlain:
      for (ShardValue& value : by_rank) out.copies_.push_back(std::move(value.parts));
      break;
    case ShardValue::Form::kMesh: CKPT_RETURN_IF_ERROR(out.TakeMeshes(by_rank)); break;
    case ShardValue::Form::kBoxes: CKPT_RETURN_IF_ERROR(out.TakeBoxes(by_rank)); break;
  }
  return out;
}

// Each mesh is that of exactly its own ranks; together they are all.
Status ShardSet::TakeMeshes(std::vector<ShardValue>& by_rank) {
  const ShardValue& first = by_rank.front();
  std::map<const Mesh*, uint64_t> holders;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const ShardValue& value = by_rank[rank];
    ++holders[value.at.mesh.get()];
    if (value.placements == first.placements && value.at.mesh->shape == first.at.mesh->shape)
      continue;
    return Refuse("rank ", rank, " has other placements, or a mesh of another shape, than rank 0");
  }
  for (const auto& [mesh, count] : holders) {
    if (count == mesh->ranks.size()) continue;  // it holds each of its ranks, once
    return Refuse("its device mesh is one of ", mesh->ranks.size(), " ranks, but ", count,
                  " of them say so");
  }
  // In the order of their lowest ranks.
  std::map<std::pair<const Mesh*, std::vector<uint64_t>>, size_t> copies;
  for (ShardValue& value : by_rank) {
    const auto [copy, added] =
        copies.try_emplace({value.at.mesh.get(), ReplicaOf(value)}, copies_.size());
    if (added) copies_.emplace_back();
    for (ShardValue::Part& part : value.parts) copies_[copy->second].push_back(std::move(part));
  }
  return {};
}

// Boxes that are there equally often make as many copies (hybrid sharding).
Status ShardSet::TakeBoxes(std::vector<ShardValue>& by_rank) {
  std::map<std::pair<std::vector<uint64_t>, Shape>, size_t> times;
  for (ShardValue& value : by_rank) {
    for (ShardValue::Part& part : value.parts) {
      if (IsEmpty(part)) continue;
      const size_t copy = times[{part.begin, part.tensor.shape()}]++;
      if (copies_.size() <= copy) copies_.emplace_back();
      copies_[copy].push_back(std::move(part));
    }
  }
  if (copies_.empty()) copies_.emplace_back();
  for (const Parts& copy : copies_) {
    if (copy.size() != copies_.front().size()) {
      return Refuse("more ranks have some of its boxes than others");
    }
  }
  return {};
}

Status ShardSet::Place(Assembler& assembler, AtomIndex atom) const {
  for (uint32_t copy = 0; copy < copies_.size(); ++copy) {
    SharedRows rows(shape_);
    auto beside = SharedRows::Beside::kNothing;
    for (const ShardValue::Part& part : copies_[copy]) {
      if (IsEmpty(part)) continue;
      const FileTensor& tensor = part.tensor;
      if (const auto bytes = tensor.Bytes()) {
        rows.Add({part.begin, tensor.shape(), tensor.blob(), bytes->offset, tensor.dtype()});
        continue;
      }
      beside = SharedRows::Beside::kOthers;
      LocalTensor local{tensor.shape(), {}};
      local.pieces.push_back(Piece{local.shape, part.begin, 0, RowMajorStrides(local.shape), 1.0});
      CKPT_ASSIGN_OR_RETURN(FileTensor::Held held, tensor.As(local));
      const uint32_t index = assembler.AddLocal(atom, copy, std::move(held.local));
      assembler.AddFragment(atom, copy, index, held.fragment);
    }
    std::move(rows).Place(assembler, atom, copy, beside);
  }
  if (copies_.size() > 1) assembler.DeclareReplicas(atom);
  return {};
}

}  // namespace ckptfs::rank_shards
