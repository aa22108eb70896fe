// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/stored_tensor.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

template <class T>
ScalarValue NumberOf(DType dtype, T value, bool python) {
  ScalarValue out{dtype, {}, std::string(sizeof(T), '\0'), python};
  std::memcpy(out.bytes.data(), &value, sizeof(T));
  return out;
}

constexpr std::string_view kFromType = "torch._tensor._rebuild_from_type_v2";
constexpr std::string_view kDTensor = "torch.distributed.tensor.DTensor";

// How torch's pickles make tensors whose elements are not plain bytes of one storage.
struct Rebuilt {
  std::string_view by;
  std::string_view what;
};
constexpr std::array kRebuilt = {
    Rebuilt{"torch._utils._rebuild_meta_tensor_no_storage",
            "it is on the meta device: the file has no elements of it"},
    Rebuilt{"torch._utils._rebuild_sparse_tensor", "it is sparse"},
    Rebuilt{"torch._utils._rebuild_qtensor", "torch quantised it"},
    Rebuilt{"torch._utils._rebuild_wrapper_subclass", "it has no elements of its own"},
    Rebuilt{"torch._utils._rebuild_nested_tensor", "it is a nested tensor"},
};

// Says why a tensor has no plain elements.
Error NotPlain(PickleRef value) {
  const std::string by = value.ClassName();
  const PickleRef arguments = by == kFromType ? value.Arguments() : PickleRef();
  const std::string type = arguments ? arguments.at(1).ClassName() : "";
  if (type == kDTensor) {
    return Error{ErrorCode::kInvalid, "it is a DTensor, of which this file has what one rank holds"}
        .Needing(
            "save with torch.distributed.checkpoint, or what get_model_state_dict returns with "
            "full_state_dict=True");
  }
  if (!type.empty()) {
    return {ErrorCode::kInvalid,
            StrCat("it is a tensor of the class ", type, ", whose elements are not understood")};
  }
  const auto row = std::ranges::find(kRebuilt, by, &Rebuilt::by);
  return {ErrorCode::kInvalid,
          StrCat("not a plain tensor (",
                 row == kRebuilt.end() ? "it is negated or conjugated, is a storage, or has a "
                                         "state of its own"
                                       : row->what,
                 ")")};
}

}  // namespace

Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what) {
  const TensorNode* node = value ? value.Tensor() : nullptr;
  if (node == nullptr) {
    Error error = value && value.IsOtherTensor() ? NotPlain(value)
                                                 : Error{ErrorCode::kInvalid, "not a tensor"};
    return Fail(std::move(error).WithContext(StrCat("'", what, "'")));
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
