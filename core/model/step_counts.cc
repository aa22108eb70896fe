// SPDX-License-Identifier: Apache-2.0

#include "core/model/step_counts.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

template <class T>
double NumberIn(std::string_view bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof(T));
  return static_cast<double>(value);
}

std::string TextOf(double steps) {
  const auto whole = static_cast<int64_t>(steps);
  return static_cast<double>(whole) == steps ? std::to_string(whole) : std::to_string(steps);
}

}  // namespace

std::optional<double> NumberOf(DType dtype, std::string_view bytes) {
  if (bytes.size() != ByteWidth(dtype)) return std::nullopt;
  switch (dtype) {
    case DType::kF32: return NumberIn<float>(bytes);
    case DType::kF64: return NumberIn<double>(bytes);
    case DType::kI64: return NumberIn<int64_t>(bytes);
    case DType::kI32: return NumberIn<int32_t>(bytes);
    default: return std::nullopt;
  }
}

std::optional<uint64_t> CountOf(DType dtype, std::string_view bytes) {
  constexpr double kMost = 1e15;
  const auto number = NumberOf(dtype, bytes);
  const bool whole = number && *number >= 0 && *number < kMost && *number == std::floor(*number);
  return whole ? std::optional(static_cast<uint64_t>(*number)) : std::nullopt;
}

std::optional<double> NumberOf(const Atom& atom) {
  return NumberOf(atom.dtype, atom.source.inline_bytes);
}

std::optional<double> StepsOf(const StepModel& step, ParameterIndex parameter) {
  const auto atom = step.FindAtom(parameter, "step");
  return atom ? NumberOf(step.atom(*atom)) : std::nullopt;
}

Status CheckOneStep(const StepModel& step, std::span<const ParameterIndex> parameters) {
  std::optional<ParameterIndex> first;
  std::optional<double> common;
  for (const ParameterIndex parameter : parameters) {
    const auto steps = StepsOf(step, parameter);
    if (!steps) continue;
    if (!common) {
      first = parameter;
      common = steps;
    }
    if (*steps == *common) continue;
    Error error{ErrorCode::kUnsupported,
                StrCat("the optimizer took ", TextOf(*common), " steps of parameter '",
                       step.parameter(*first).name, "' and ", TextOf(*steps), " of '",
                       step.parameter(parameter).name, "'")};
    error.parameter = step.parameter(parameter).name;
    return Fail(std::move(error));
  }
  return {};
}

Status CheckOneStep(const StepModel& step) {
  std::vector<ParameterIndex> all;
  for (const Group& group : step.groups) {
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  }
  return CheckOneStep(step, all);
}

}  // namespace ckptfs
