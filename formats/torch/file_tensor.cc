// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_tensor.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

bool IsDense(const Shape& shape, const std::vector<uint64_t>& strides, uint64_t elements) {
  if (elements == 0) return true;
  const std::vector<uint64_t> dense = RowMajorStrides(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

// `flat` elements of a row-major tensor as steps along each of its dims.
std::vector<uint64_t> StepsOf(uint64_t flat, const std::vector<uint64_t>& dense) {
  std::vector<uint64_t> steps(dense.size());
  for (size_t k = 0; k < dense.size(); ++k) {
    steps[k] = flat / dense[k];
    flat -= steps[k] * dense[k];
  }
  return steps;
}

}  // namespace

FileTensor::FileTensor(const TensorNode& tensor, uint64_t elements, uint64_t storage_at,
                       BlobIndex blob)
    : blob_(blob),
      dtype_(tensor.dtype),
      dense_(IsDense(tensor.shape, tensor.strides, elements)),
      shape_(tensor.shape),
      strides_(tensor.strides),
      elements_(elements),
      storage_elements_(tensor.storage_elements),
      storage_offset_(tensor.storage_offset),
      storage_at_(storage_at),
      storage_key_(tensor.storage_key) {}

uint64_t FileTensor::first_byte() const {
  return storage_at_ + storage_offset_ * ByteWidth(dtype_);
}

bool FileTensor::SameBytes(const FileTensor& other) const {
  return blob_ == other.blob_ && storage_key_ == other.storage_key_ && dtype_ == other.dtype_ &&
         storage_offset_ == other.storage_offset_ && shape_ == other.shape_ &&
         strides_ == other.strides_;
}

Status FileTensor::RequireDense() const {
  if (dense_) return {};
  return Fail(ErrorCode::kInvalid, StrCat("not contiguous: shape ", ShapeToString(shape_),
                                          " with strides ", ShapeToString(strides_)));
}

Result<StorageRecord> FileTensor::Bytes() const {
  CKPT_RETURN_IF_ERROR(RequireDense());
  return StorageRecord{first_byte(), elements_ * ByteWidth(dtype_)};
}

Result<Fragment> FileTensor::Slice(uint64_t at, uint64_t begin, uint64_t end) const {
  CKPT_RETURN_IF_ERROR(RequireDense());
  if (begin > end || !RangeInside(at, end - begin, elements_)) {
    return Fail(ErrorCode::kInvalid,
                StrCat("elements [", at, ", ", at + (end - begin), ") of ", elements_));
  }
  return Fragment{begin, end, blob_, first_byte() + at * ByteWidth(dtype_), dtype_};
}

// A box of the row-major tensor as one of the storage.  A step along a dim of
// the box is a step along one or more dims of the tensor; where none of them
// carries into the next, it is the sum of their strides.
Result<Piece> FileTensor::Restrided(const Piece& piece) const {
  const std::vector<uint64_t> dense = RowMajorStrides(shape_);
  std::vector<uint64_t> reach = StepsOf(piece.local_offset, dense);
  Piece out = piece;
  out.local_offset = storage_offset_;
  if (std::find(piece.shape.begin(), piece.shape.end(), 0) != piece.shape.end()) return out;
  for (size_t k = 0; k < shape_.size(); ++k) out.local_offset += reach[k] * strides_[k];
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    out.local_strides[d] = 0;
    if (piece.shape[d] < 2) continue;
    const std::vector<uint64_t> steps = StepsOf(piece.local_strides[d], dense);
    for (size_t k = 0; k < shape_.size(); ++k) {
      out.local_strides[d] += steps[k] * strides_[k];
      reach[k] += steps[k] * (piece.shape[d] - 1);
    }
  }
  for (size_t k = 0; k < shape_.size(); ++k) {
    if (reach[k] < shape_[k]) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat("not contiguous (shape ", ShapeToString(shape_), ", strides ",
                       ShapeToString(strides_), "), but cut across its rows"));
  }
  return out;
}

Result<FileTensor::Held> FileTensor::As(const LocalTensor& local) const {
  if (shape_ != local.shape) {
    return Fail(ErrorCode::kInvalid, StrCat("shape ", ShapeToString(shape_), " where ",
                                            ShapeToString(local.shape), " is expected"));
  }
  if (dense_) return Held{local, Fragment{0, elements_, blob_, first_byte(), dtype_}};
  Held out{{{storage_elements_}, {}}, {0, storage_elements_, blob_, storage_at_, dtype_}};
  for (const Piece& piece : local.pieces) {
    CKPT_ASSIGN_OR_RETURN(Piece restrided, Restrided(piece));
    out.local.pieces.push_back(std::move(restrided));
  }
  return out;
}

Result<FileTensor> FileTensor::Reshaped(Shape shape) const {
  CKPT_RETURN_IF_ERROR(RequireDense());
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(shape));
  if (elements != elements_) {
    return Fail(ErrorCode::kInvalid,
                StrCat(elements_, " elements where ", ShapeToString(shape), " is expected"));
  }
  FileTensor out = *this;
  out.strides_ = RowMajorStrides(shape);
  out.shape_ = std::move(shape);
  return out;
}

StoredTensor FileTensor::Stored() const { return {dtype_, shape_, strides_, blob_, first_byte()}; }

}  // namespace ckptfs
