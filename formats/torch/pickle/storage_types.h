// SPDX-License-Identifier: Apache-2.0
//
// The storage classes that torch names in persistent ids
// (torch/storage.py _dtype_to_storage_type_map) and the global names that
// rebuild tensors (torch/_utils.py).
//
// Thread safety: pure functions over constants.

#pragma once

#include <optional>
#include <string_view>

#include "core/tensor/dtype.h"

namespace ckptfs {

struct StorageType {
  std::string_view name;  // "FloatStorage"
  DType dtype;
  // False for quantised and untyped storages: their tensors are rebuilt by other means.
  bool plain;
};

std::optional<StorageType> FindStorageType(std::string_view class_name);

// The storage class that _rebuild_tensor_v2 wants for this dtype; empty for the
// dtypes that torch saves as UntypedStorage with _rebuild_tensor_v3.
std::string_view StorageClassOf(DType dtype);

inline constexpr std::string_view kUntypedStorage = "UntypedStorage";

}  // namespace ckptfs
