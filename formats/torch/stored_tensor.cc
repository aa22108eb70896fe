// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/stored_tensor.h"

#include <cstring>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

template <class T>
ScalarValue NumberOf(DType dtype, T value, bool python) {
  ScalarValue out{dtype, {}, std::string(sizeof(T), '\0'), python};
  std::memcpy(out.bytes.data(), &value, sizeof(T));
  return out;
}

}  // namespace

Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what) {
  const TensorNode* node = value ? value.Tensor() : nullptr;
  if (node == nullptr) {
    const bool other = value && value.IsOtherTensor();
    return Fail(ErrorCode::kInvalid,
                StrCat("'", what, "': ",
                       other ? "not a plain tensor (it is negated, conjugated, quantised or "
                               "sparse, is "
                               "a storage, or has a state of its own)"
                             : "not a tensor"));
  }
  auto located = file.Locate(*node, blob);
  if (!located) return Fail(std::move(located).error().WithContext(StrCat("'", what, "'")));
  return located;
}

Result<std::optional<ScalarValue>> ScalarOf(PickleRef value, const TorchFile& file) {
  using Maybe = std::optional<ScalarValue>;
  if (!value) return Maybe();
  if (const TensorNode* node = value.Tensor()) {
    if (!node->shape.empty()) return Maybe();
    CKPT_ASSIGN_OR_RETURN(const FileTensor located, file.Locate(*node, BlobIndex{}));
    CKPT_ASSIGN_OR_RETURN(std::string bytes, file.Read(located));
    return Maybe(ScalarValue{node->dtype, node->shape, std::move(bytes), false});
  }
  if (const auto whole = value.Int()) return Maybe(NumberOf(DType::kI64, *whole, true));
  if (const auto number = value.Number()) return Maybe(NumberOf(DType::kF64, *number, true));
  return Maybe();
}

Result<TensorDict> TensorDictOf(PickleRef dict, const TorchFile& file, BlobIndex blob) {
  TensorDict out;
  for (const auto& [key, value] : dict.Items()) {
    const auto name = key.String();
    if (!name) return Fail(ErrorCode::kInvalid, "a tensor's name is not text");
    if (value.Tensor() == nullptr && !value.IsOtherTensor()) {
      out.left_out.emplace_back(*name);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(FileTensor tensor, FileTensorOf(value, file, blob, *name));
    out.tensors.push_back(NamedTensor{std::string(*name), std::move(tensor)});
  }
  return out;
}

LeftOut LeftOutEntries(const std::set<std::string>& names) {
  return {LeftOutPart::kModel, StrCat("'", *names.begin(), "' of the module"), "it is not a tensor",
          "", names.size() - 1};
}

void LeaveOutEntries(const std::set<std::string>& names, StepModel& header) {
  if (names.empty()) return;
  LeaveOut(header, LeftOutEntries(names));
}

}  // namespace ckptfs
