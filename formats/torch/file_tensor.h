// SPDX-License-Identifier: Apache-2.0
//
// FileTensor is a tensor of a torch file by where its bytes lie, so that the
// file's tree can be dropped.
//
// It is the only way from a torch file to tensor bytes, and no reader can pass
// its strides over: TorchFile keeps its storages to itself and Locate is what
// makes a FileTensor; no accessor gives a byte offset.  An offset leaves only
// as part of an answer in which the strides have been dealt with: Bytes and
// Slice refuse what is not dense, As and Stored carry the strides along.
//
// Thread safety: immutable.
// Lifetime: independent of the file.
// Units: shapes, strides and storage offsets are elements.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

// Bytes [offset, offset + length) of a file.
struct StorageRecord {
  uint64_t offset = 0;
  uint64_t length = 0;
  std::optional<BlobIndex> blob = std::nullopt;  // of another file than the tree's
};

class FileTensor {
 public:
  BlobIndex blob() const { return blob_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  uint64_t elements() const { return elements_; }
  // Row-major, each element once, without gaps.
  bool dense() const { return dense_; }

  // The storage that it is a view of, and its place there: for telling views apart.
  const std::string& storage_key() const { return storage_key_; }
  uint64_t storage_offset() const { return storage_offset_; }
  uint64_t storage_elements() const { return storage_elements_; }
  // The same bytes under another name (torch's own tying).
  bool SameBytes(const FileTensor& other) const;

  // The bytes of all elements in row-major order.  kInvalid unless dense.
  Result<StorageRecord> Bytes() const;

  // Elements [at, at + end - begin) as the flat range [begin, end) of a local
  // tensor.  kInvalid unless dense and inside.
  Result<Fragment> Slice(uint64_t at, uint64_t begin, uint64_t end) const;

  // All of it as the local tensor that a rank held, whatever its strides.
  // kInvalid if the local tensor has another shape.
  struct Held {
    LocalTensor local;
    Fragment fragment;
  };
  Result<Held> As(const LocalTensor& local) const;

  // The same elements in row-major order under another shape.  kInvalid unless
  // dense and of as many elements.
  Result<FileTensor> Reshaped(Shape shape) const;

  // For a document, with its strides.
  StoredTensor Stored() const;

 private:
  friend class TorchFile;
  FileTensor(const TensorNode& tensor, uint64_t elements, uint64_t storage_at, BlobIndex blob);
  uint64_t first_byte() const;
  Status RequireDense() const;
  Result<Piece> Restrided(const Piece& piece) const;

  BlobIndex blob_;
  DType dtype_;
  bool dense_;
  Shape shape_;
  std::vector<uint64_t> strides_;
  uint64_t elements_;
  uint64_t storage_elements_;
  uint64_t storage_offset_;  // of the tensor's first element
  uint64_t storage_at_;      // byte of the file where the storage begins
  std::string storage_key_;
};

}  // namespace ckptfs
