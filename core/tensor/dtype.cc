// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/dtype.h"

#include <array>

namespace ckptfs {
namespace {

struct DTypeRow {
  uint32_t bits;
  std::string_view name;         // ours
  std::string_view safetensors;  // empty: safetensors has none
  std::string_view torch;        // empty: torch has none
};

// In the order of the enum.
constexpr std::array<DTypeRow, kDTypeCount> kRows = {{
    {64, "fp64", "F64", "float64"},
    {32, "fp32", "F32", "float32"},
    {16, "fp16", "F16", "float16"},
    {16, "bf16", "BF16", "bfloat16"},
    {8, "fp8_e4m3", "F8_E4M3", "float8_e4m3fn"},
    {8, "fp8_e5m2", "F8_E5M2", "float8_e5m2"},
    {8, "fp8_e4m3fnuz", "F8_E4M3FNUZ", "float8_e4m3fnuz"},
    {8, "fp8_e5m2fnuz", "F8_E5M2FNUZ", "float8_e5m2fnuz"},
    {8, "fp8_e8m0", "F8_E8M0", "float8_e8m0fnu"},
    {64, "int64", "I64", "int64"},
    {32, "int32", "I32", "int32"},
    {16, "int16", "I16", "int16"},
    {8, "int8", "I8", "int8"},
    {64, "uint64", "U64", "uint64"},
    {32, "uint32", "U32", "uint32"},
    {16, "uint16", "U16", "uint16"},
    {8, "uint8", "U8", "uint8"},
    {8, "bool", "BOOL", "bool"},
    {64, "complex64", "C64", "complex64"},
    {128, "complex128", "", "complex128"},
    {6, "fp6_e2m3", "F6_E2M3", ""},
    {6, "fp6_e3m2", "F6_E3M2", ""},
    {4, "fp4", "F4", ""},
}};

const DTypeRow& RowOf(DType dtype) { return kRows.at(static_cast<size_t>(dtype)); }

std::optional<DType> FindRow(std::string_view DTypeRow::*column, std::string_view text) {
  if (text.empty()) return std::nullopt;
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].*column == text) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace

uint32_t BitWidth(DType dtype) { return RowOf(dtype).bits; }

uint32_t ByteWidth(DType dtype) {
  const uint32_t bits = BitWidth(dtype);
  return bits % 8 == 0 ? bits / 8 : 0;
}

std::string_view DTypeName(DType dtype) { return RowOf(dtype).name; }
std::string_view SafetensorsName(DType dtype) { return RowOf(dtype).safetensors; }
std::string_view TorchName(DType dtype) { return RowOf(dtype).torch; }

std::optional<DType> DTypeFromName(std::string_view name) { return FindRow(&DTypeRow::name, name); }
std::optional<DType> DTypeFromSafetensors(std::string_view name) {
  return FindRow(&DTypeRow::safetensors, name);
}
std::optional<DType> DTypeFromTorch(std::string_view name) {
  return FindRow(&DTypeRow::torch, name);
}

bool IsFloat(DType dtype) {
  return static_cast<uint8_t>(dtype) <= static_cast<uint8_t>(DType::kBF16);
}

}  // namespace ckptfs
