// SPDX-License-Identifier: Apache-2.0

#include "core/encoding/encoded_weights.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr std::string_view kScaleSuffix = "_scale_inv";
constexpr std::string_view kBlocksSuffix = "_blocks";
constexpr std::string_view kScalesSuffix = "_scales";
constexpr uint64_t kMxfp4Bytes = 16;  // of a block

tl::unexpected<Error> Unfit(std::string why, std::string_view parameter) {
  return Fail(Error{ErrorCode::kUnsupported, std::move(why)}.OfParameter(parameter));
}

// The only atom of the parameter, a weight; null if it has others.
const Atom* OnlyWeight(const StepModel& step, ParameterIndex parameter) {
  const auto atom = step.FindAtom(parameter, "weight");
  return atom ? &step.atom(*atom) : nullptr;
}

bool IsScaleOfFp8(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF8E8M0 ||
         dtype == DType::kU8;
}

Result<EncodedWeight> Fp8Weight(const StepModel& step, ParameterIndex values,
                                const ScaleBlock& block) {
  const Parameter& parameter = step.parameter(values);
  const auto scales = step.FindParameter(StrCat(parameter.name, kScaleSuffix));
  const Atom* atom = scales ? OnlyWeight(step, *scales) : nullptr;
  if (atom == nullptr) return Unfit("it is fp8, and has no scales", parameter.name);
  const Shape& shape = parameter.shape;
  if (shape.size() < 2) return Unfit("it is fp8 of one dimension", parameter.name);
  Shape blocks = shape;
  uint64_t& rows = blocks[blocks.size() - 2];
  rows = CeilDiv(rows, block.rows);
  blocks.back() = CeilDiv(blocks.back(), block.columns);
  if (!IsScaleOfFp8(atom->dtype) || atom->shape != blocks) {
    return Unfit(StrCat("its scales are ", DTypeName(atom->dtype), " of ",
                        ShapeToString(atom->shape), ", but ", block.rows, " x ", block.columns,
                        " in a block make ", ShapeToString(blocks)),
                 parameter.name);
  }
  return EncodedWeight{values, *scales, parameter.name, shape};
}

Result<EncodedWeight> Mxfp4Weight(const StepModel& step, ParameterIndex values) {
  const Parameter& parameter = step.parameter(values);
  const std::string name = parameter.name.substr(0, parameter.name.size() - kBlocksSuffix.size());
  const auto scales = step.FindParameter(StrCat(name, kScalesSuffix));
  const Atom *atom = OnlyWeight(step, values),
             *exponents = scales ? OnlyWeight(step, *scales) : nullptr;
  if (exponents == nullptr) return Unfit("its blocks have no scales", parameter.name);
  const Shape& shape = parameter.shape;
  if (shape.size() != 4 || shape[3] != kMxfp4Bytes || atom == nullptr ||
      atom->dtype != DType::kU8 || exponents->dtype != DType::kU8 ||
      exponents->shape != Shape(shape.begin(), shape.end() - 1)) {
    return Unfit("its blocks and scales are not those of mxfp4", parameter.name);
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t columns,
                        CheckedMul(shape[2], kMxfp4Block.columns, "columns"));
  const Shape decoded = {shape[0], columns, shape[1]};
  CKPT_RETURN_IF_ERROR(ElementCount(decoded));
  if (step.FindParameter(name)) return Unfit("it is there without blocks, too", name);
  return EncodedWeight{values, *scales, name, decoded};
}

bool IsEncoded(const StepModel& step, ParameterIndex parameter, EncodingMethod method) {
  const Atom* atom = OnlyWeight(step, parameter);
  if (atom == nullptr) return false;
  if (method == EncodingMethod::kFp8) return atom->dtype == DType::kF8E4M3;
  return step.parameter(parameter).name.ends_with(kBlocksSuffix);
}

bool IsScale(const std::string& name, EncodingMethod method) {
  return name.ends_with(method == EncodingMethod::kFp8 ? kScaleSuffix : kScalesSuffix);
}

// No plain weight has this type.
bool IsPacked(const StepModel& step, ParameterIndex parameter) {
  const Atom* atom = OnlyWeight(step, parameter);
  return atom != nullptr && BitWidth(atom->dtype) <= 8 && atom->dtype != DType::kBool;
}

}  // namespace

Result<std::vector<EncodedWeight>> FindEncodedWeights(const StepModel& step,
                                                      const EncodingConfig& config) {
  std::vector<EncodedWeight> out;
  std::set<ParameterIndex> scales;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (!IsEncoded(step, ParameterIndex{i}, config.method)) continue;
    auto found = config.method == EncodingMethod::kFp8
                     ? Fp8Weight(step, ParameterIndex{i}, config.block)
                     : Mxfp4Weight(step, ParameterIndex{i});
    if (!found) return Fail(std::move(found).error());
    scales.insert(found->scales);
    scales.insert(found->values);
    out.push_back(*std::move(found));
  }
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (scales.contains(ParameterIndex{i})) continue;
    const std::string& name = step.parameters[i].name;
    if (IsScale(name, config.method)) return Unfit("no values belong to these scales", name);
    if (IsPacked(step, ParameterIndex{i})) return Unfit("nothing says how it is packed", name);
  }
  if (out.empty()) {
    return Fail(ErrorCode::kUnsupported, "none of its weights is stored with scales per block");
  }
  return out;
}

}  // namespace ckptfs
