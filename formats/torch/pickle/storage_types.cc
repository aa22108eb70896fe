// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/storage_types.h"

#include <array>

namespace ckptfs {
namespace {

constexpr std::array<StorageType, 18> kTypes = {{
    {"DoubleStorage", DType::kF64, true},
    {"FloatStorage", DType::kF32, true},
    {"HalfStorage", DType::kF16, true},
    {"BFloat16Storage", DType::kBF16, true},
    {"LongStorage", DType::kI64, true},
    {"IntStorage", DType::kI32, true},
    {"ShortStorage", DType::kI16, true},
    {"CharStorage", DType::kI8, true},
    {"ByteStorage", DType::kU8, true},
    {"BoolStorage", DType::kBool, true},
    {"ComplexDoubleStorage", DType::kC128, true},
    {"ComplexFloatStorage", DType::kC64, true},
    {"QInt8Storage", DType::kI8, false},
    {"QUInt8Storage", DType::kU8, false},
    {"QInt32Storage", DType::kI32, false},
    {"QUInt4x2Storage", DType::kU8, false},
    {"QUInt2x4Storage", DType::kU8, false},
    {kUntypedStorage, DType::kU8, false},
}};

}  // namespace

std::optional<StorageType> FindStorageType(std::string_view class_name) {
  for (const StorageType& type : kTypes) {
    if (type.name == class_name) return type;
  }
  return std::nullopt;
}

std::string_view StorageClassOf(DType dtype) {
  for (const StorageType& type : kTypes) {
    if (type.plain && type.dtype == dtype) return type.name;
  }
  return {};
}

}  // namespace ckptfs
