// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/plain_value.h"

#include <variant>
#include <vector>

#include "formats/torch/numpy_number.h"

namespace ckptfs {
namespace {

constexpr int kMaxDepth = 8;  // betas in a tuple, a tuple of these

NodeId Print(const PythonNumber& number, PickleBuilder& builder) {
  if (const bool* truth = std::get_if<bool>(&number)) return builder.Bool(*truth);
  if (const int64_t* whole = std::get_if<int64_t>(&number)) return builder.Int(*whole);
  return builder.Float(std::get<double>(number));
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
  const auto number = NumpyNumberOf(value.tree(), value.node());
  if (number) return std::optional(Print(*number, builder));
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
  const auto number = PythonNumberOf(dtype, bytes);
  return number ? std::optional(Print(*number, builder)) : std::nullopt;
}

Result<std::optional<NodeId>> CopyPlain(PickleRef value, const TorchFile* file,
                                        PickleBuilder& builder) {
  return CopyItem(value, file, 0, builder);
}

}  // namespace ckptfs
