// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/plain_value.h"

#include <cstring>
#include <span>
#include <vector>

#include "core/tensor/cast.h"

namespace ckptfs {
namespace {

constexpr int kMaxDepth = 8;  // betas in a tuple, a tuple of these

template <class T>
T FromBytes(const std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

bool HoldsTensor(PickleRef value) {
  return AnyNode(value,
                 [](const PickleNode& node) { return node.kind == PickleNode::Kind::kTensor; });
}

Result<std::optional<NodeId>> CopyTensor(const TensorNode& tensor, const TorchFile* file,
                                         PickleBuilder& builder) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
  if (elements != 1 || file == nullptr) return std::optional<NodeId>();
  CKPT_ASSIGN_OR_RETURN(const FileTensor located, file->Locate(tensor, BlobIndex{}));
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, file->Read(located));
  return NumberNode(tensor.dtype, bytes, builder);
}

Result<std::optional<NodeId>> CopyItem(PickleRef value, const TorchFile* file, int depth,
                                       PickleBuilder& builder) {
  if (const TensorNode* tensor = value.Tensor()) return CopyTensor(*tensor, file, builder);
  const PickleNode::Kind kind = value.node().kind;
  if (kind == PickleNode::Kind::kReduce) {  // else it is a number of Python already
    if (const auto whole = value.Int()) return std::optional(builder.Int(*whole));
    if (const auto truth = value.Bool()) return std::optional(builder.Bool(*truth));
    if (const auto number = value.Number()) return std::optional(builder.Float(*number));
  }
  const bool container = kind == PickleNode::Kind::kTuple || kind == PickleNode::Kind::kList;
  if (!container || depth == kMaxDepth) {
    if (HoldsTensor(value)) return std::optional<NodeId>();
    return std::optional(builder.Copy(value));
  }
  std::vector<NodeId> items;
  for (size_t i = 0; i < value.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(const auto item, CopyItem(value.at(i), file, depth + 1, builder));
    if (!item) return item;
    items.push_back(*item);
  }
  return std::optional(kind == PickleNode::Kind::kTuple ? builder.Tuple(std::move(items))
                                                        : builder.List(std::move(items)));
}

}  // namespace

std::optional<NodeId> NumberNode(DType dtype, const std::string& bytes, PickleBuilder& builder) {
  switch (dtype) {
    case DType::kF64: return builder.Float(FromBytes<double>(bytes));
    case DType::kF32: return builder.Float(static_cast<double>(FromBytes<float>(bytes)));
    case DType::kI64: return builder.Int(FromBytes<int64_t>(bytes));
    case DType::kI32: return builder.Int(FromBytes<int32_t>(bytes));
    case DType::kI16: return builder.Int(FromBytes<int16_t>(bytes));
    case DType::kI8: return builder.Int(FromBytes<int8_t>(bytes));
    case DType::kU8: return builder.Int(FromBytes<uint8_t>(bytes));
    case DType::kBool: return builder.Bool(bytes[0] != 0);
    default: break;
  }
  const CastFunction cast = FindCast(dtype, DType::kF64);
  if (cast == nullptr) return std::nullopt;
  std::string wide(sizeof(double), '\0');
  cast(std::as_bytes(std::span(bytes)).data(), std::as_writable_bytes(std::span(wide)).data(), 1);
  return builder.Float(FromBytes<double>(wide));
}

Result<std::optional<NodeId>> CopyPlain(PickleRef value, const TorchFile* file,
                                        PickleBuilder& builder) {
  return CopyItem(value, file, 0, builder);
}

}  // namespace ckptfs
