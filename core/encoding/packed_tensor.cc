// SPDX-License-Identifier: Apache-2.0

#include "core/encoding/packed_tensor.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// How the names of the values and of what stands beside them end.
struct Spelling {
  std::string_view values;
  std::string_view beside;
};
constexpr std::array kSpellings = {
    Spelling{"", "_scale"},          Spelling{"", "_scale_inv"},
    Spelling{"", ".absmax"},         Spelling{".weight", ".scale_weight"},
    Spelling{".weight", ".scale"},   Spelling{".weight", ".scales"},
    Spelling{".weight", ".SCB"},     Spelling{".weight_packed", ".weight_scale"},
    Spelling{".qweight", ".scales"}, Spelling{".qweight", ".qzeros"},
    Spelling{"_blocks", "_scales"},  Spelling{"._data", "._scale"},
};

bool IsNarrow(const StepModel& step, size_t parameter) {
  const auto atom = step.FindAtom(ParameterIndex{static_cast<uint32_t>(parameter)}, "weight");
  if (!atom) return false;
  const DType dtype = step.atom(*atom).dtype;
  return dtype != DType::kBool && (!IsFloat(dtype) || ByteWidth(dtype) <= 1);
}

bool HasScales(const StepModel& step, std::string_view name) {
  return std::ranges::any_of(kSpellings, [&](const Spelling& one) {
    if (!name.ends_with(one.values)) return false;
    const std::string_view stem = name.substr(0, name.size() - one.values.size());
    return step.FindParameter(StrCat(stem, one.beside)).has_value();
  });
}

// The first parameter that is as asked.
std::optional<std::string_view> FindFirst(const StepModel& step, const auto& is_one) {
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    if (is_one(i)) return step.parameters[i].name;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string_view> FindPackedTensor(const StepModel& step) {
  return FindFirst(step, [&](size_t i) {
    return IsNarrow(step, i) && HasScales(step, step.parameters[i].name);
  });
}

std::optional<std::string_view> FindNarrowTensor(const StepModel& step) {
  return FindFirst(step, [&](size_t i) {
    return step.parameters[i].role != Role::kBuffer && IsNarrow(step, i);
  });
}

std::optional<std::string_view> FindByteFloats(const StepModel& step) {
  return FindFirst(step, [&](size_t i) {
    const ParameterIndex parameter{static_cast<uint32_t>(i)};
    const auto weight = step.FindAtom(parameter, "weight");
    if (!weight || step.FindAtom(parameter, "master")) return false;
    const DType dtype = step.atom(*weight).dtype;
    const bool byte = dtype >= DType::kF8E4M3 && dtype <= DType::kF8E8M0;
    return byte || (IsFloat(dtype) && BitWidth(dtype) <= 8);
  });
}

}  // namespace ckptfs
