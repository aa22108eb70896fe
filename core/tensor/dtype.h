// SPDX-License-Identifier: Apache-2.0
//
// DType names how one element of a tensor is stored.
//
// Thread safety: value type; the functions are pure.
// Units: widths are bits; sub-byte types have no byte width and are only ever
// passed through whole.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ckptfs {

// The numbers are stored in manifests: append only.
enum class DType : uint8_t {
  kF64 = 0,
  kF32 = 1,
  kF16 = 2,
  kBF16 = 3,
  kF8E4M3 = 4,
  kF8E5M2 = 5,
  kF8E4M3Fnuz = 6,
  kF8E5M2Fnuz = 7,
  kF8E8M0 = 8,
  kI64 = 9,
  kI32 = 10,
  kI16 = 11,
  kI8 = 12,
  kU64 = 13,
  kU32 = 14,
  kU16 = 15,
  kU8 = 16,
  kBool = 17,
  kC64 = 18,
  kC128 = 19,  // complex of two fp32, two fp64
  kF6E2M3 = 20,
  kF6E3M2 = 21,
  kF4 = 22,  // sub-byte
};
inline constexpr int kDTypeCount = 23;

uint32_t BitWidth(DType dtype);
// Bytes of one element; 0 for sub-byte types.
uint32_t ByteWidth(DType dtype);

// Our own spelling, as in layouts and info.json: "fp32", "bf16", "int64", ...
std::string_view DTypeName(DType dtype);
// Safetensors' spelling: "F32", "BF16", ... (safetensors 0.8 tensor.rs).
std::string_view SafetensorsName(DType dtype);
// torch's attribute name: "float32", "bfloat16", ...; empty if torch has none.
std::string_view TorchName(DType dtype);

std::optional<DType> DTypeFromName(std::string_view name);
std::optional<DType> DTypeFromSafetensors(std::string_view name);
std::optional<DType> DTypeFromTorch(std::string_view name);

// fp64, fp32, fp16, bf16: the types between which weights are cast.
bool IsFloat(DType dtype);

}  // namespace ckptfs
