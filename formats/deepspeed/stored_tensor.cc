// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/stored_tensor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/strings.h"

namespace ckptfs::deepspeed {
namespace {

constexpr uint64_t kMaxInlineBytes = 64;

Result<std::string> ReadBytes(const std::string& path, uint64_t offset, uint64_t length) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Fail(ErrnoError(errno, path));
  std::string bytes(length, '\0');
  ssize_t got = ::pread(fd, bytes.data(), length, static_cast<off_t>(offset));
  const int error = errno;
  ::close(fd);
  if (got < 0) return Fail(ErrnoError(error, path));
  if (static_cast<uint64_t>(got) != length) {
    return Fail(ErrorCode::kDataLoss, StrCat(path, ": shorter than its records say"));
  }
  return bytes;
}

template <class T>
ScalarValue NumberOf(DType dtype, T value, bool python) {
  ScalarValue out{dtype, {}, std::string(sizeof(T), '\0'), python};
  std::memcpy(out.bytes.data(), &value, sizeof(T));
  return out;
}

}  // namespace

uint64_t FileTensor::elements() const {
  const auto count = ElementCount(shape);
  CKPT_CHECK(count.has_value());
  return *count;
}

bool FileTensor::contiguous() const {
  const std::vector<uint64_t> dense = RowMajorStrides(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return true;
    if (shape[d] != 1 && strides[d] != dense[d]) return false;
  }
  return true;
}

uint64_t FileTensor::first_byte() const { return storage_at + storage_offset * ByteWidth(dtype); }

bool FileTensor::SameBytes(const FileTensor& other) const {
  return blob == other.blob && storage_key == other.storage_key && dtype == other.dtype &&
         storage_offset == other.storage_offset && shape == other.shape && strides == other.strides;
}

Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what) {
  const TensorNode* node = value ? value.Tensor() : nullptr;
  if (node == nullptr) return Fail(ErrorCode::kInvalid, StrCat(what, ": not a tensor"));
  CKPT_RETURN_IF_ERROR(ElementCount(node->shape));
  auto record = file.Locate(*node);
  if (!record) return Fail(std::move(record).error().WithContext(what));
  if (ByteWidth(node->dtype) == 0) {
    return Fail(ErrorCode::kUnsupported, StrCat(what, ": elements smaller than a byte"));
  }
  return FileTensor{blob,
                    node->dtype,
                    node->shape,
                    node->strides,
                    node->storage_elements,
                    node->storage_offset,
                    record->offset,
                    node->storage_key};
}

LocalTensor RestridedTo(const FileTensor& tensor, const LocalTensor& local) {
  LocalTensor out;
  out.shape = {tensor.storage_elements};
  const std::vector<uint64_t> dense = RowMajorStrides(local.shape);
  for (Piece piece : local.pieces) {
    uint64_t rest = piece.local_offset;
    uint64_t offset = tensor.storage_offset;
    for (size_t d = 0; d < dense.size(); ++d) {
      const uint64_t index = dense[d] == 0 ? 0 : rest / dense[d];
      rest -= index * dense[d];
      offset += index * tensor.strides[d];
    }
    piece.local_offset = offset;
    for (size_t d = 0; d < piece.local_strides.size() && d < tensor.strides.size(); ++d) {
      piece.local_strides[d] = tensor.strides[d];
    }
    out.pieces.push_back(std::move(piece));
  }
  return out;
}

Result<std::optional<ScalarValue>> ScalarOf(PickleRef value, const TorchFile& file,
                                            const std::string& path) {
  using Maybe = std::optional<ScalarValue>;
  if (!value) return Maybe();
  if (const TensorNode* node = value.Tensor()) {
    const auto count = ElementCount(node->shape);
    const bool small = count && node->shape.empty() && ByteWidth(node->dtype) > 0 &&
                       *count * ByteWidth(node->dtype) <= kMaxInlineBytes;
    if (!small) return Maybe();
    CKPT_ASSIGN_OR_RETURN(const StorageRecord record, file.LocateElements(*node));
    CKPT_ASSIGN_OR_RETURN(
        std::string bytes, ReadBytes(path, record.offset, *count * ByteWidth(node->dtype)));
    return Maybe(ScalarValue{node->dtype, node->shape, std::move(bytes), false});
  }
  if (value.node().kind == PickleNode::Kind::kInt) {
    return Maybe(NumberOf(DType::kI64, value.node().integer, true));
  }
  if (value.node().kind == PickleNode::Kind::kFloat) {
    return Maybe(NumberOf(DType::kF64, value.node().real, true));
  }
  return Maybe();
}

}  // namespace ckptfs::deepspeed
