// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/piece.h"

#include <cmath>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

Status Broken(std::string rule) { return Fail(ErrorCode::kInvalid, std::move(rule)); }

bool IsEmpty(const Shape& shape) {
  for (uint64_t dim : shape) {
    if (dim == 0) return true;
  }
  return false;
}

Status ValidateBox(const Piece& piece, const Shape& atom) {
  const size_t rank = atom.size();
  if (piece.shape.size() != rank || piece.atom_begin.size() != rank ||
      piece.local_strides.size() != rank) {
    return Broken(StrCat("a piece does not have the atom's ", rank, " dimensions"));
  }
  for (size_t d = 0; d < rank; ++d) {
    if (!RangeInside(piece.atom_begin[d], piece.shape[d], atom[d])) {
      return Broken(StrCat("a piece leaves the atom in dimension ", d, ": ", piece.atom_begin[d],
                           " + ", piece.shape[d], " > ", atom[d]));
    }
  }
  if (!std::isfinite(piece.scale) || piece.scale == 0) {
    return Broken("a piece's scale is zero or not finite");
  }
  return {};
}

// The last element of the box's image lies inside `elements`.
Status ValidateImage(const Piece& piece, uint64_t elements) {
  if (IsEmpty(piece.shape)) return {};
  uint64_t last = piece.local_offset;
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    uint64_t reach;
    if (__builtin_mul_overflow(piece.shape[d] - 1, piece.local_strides[d], &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return Broken(StrCat("a piece's strides overflow in dimension ", d));
    }
  }
  if (last >= elements) {
    return Broken(StrCat("a piece's last element is ", last,
                         ", but the size of its local "
                         "tensor is ",
                         elements));
  }
  return {};
}

}  // namespace

LocalTensor WholeTensor(const Shape& shape) {
  Piece piece{shape, std::vector<uint64_t>(shape.size(), 0), 0, RowMajorStrides(shape), 1.0};
  return LocalTensor{shape, {std::move(piece)}};
}

LocalTensor StridedView(const Shape& shape, uint64_t storage_elements, uint64_t storage_offset,
                        const std::vector<uint64_t>& strides) {
  Piece piece{shape, std::vector<uint64_t>(shape.size(), 0), storage_offset, strides, 1.0};
  return LocalTensor{{storage_elements}, {std::move(piece)}};
}

Status ValidateLocal(const LocalTensor& local, const Shape& atom) {
  CKPT_RETURN_IF_ERROR(ElementCount(atom));
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(local.shape));
  for (const Piece& piece : local.pieces) {
    CKPT_RETURN_IF_ERROR(ValidateBox(piece, atom));
    CKPT_RETURN_IF_ERROR(ValidateImage(piece, elements));
  }
  return {};
}

}  // namespace ckptfs
