// SPDX-License-Identifier: Apache-2.0
//
// FindEncodedWeights finds the weights of a step that are stored as values with a scale per block,
// and the tensors that have the scales:
//
//   fp8     <name>            F8_E4M3  [..., rows, columns]
//           <name>_scale_inv  F32, BF16, F8_E8M0, U8 (exponents)  [..., blocks, blocks]
//           (DeepSeek-V3; quant_method "fp8" with a weight_block_size)
//   mxfp4   <name>_blocks     U8  [experts, rows, columns / 32, 16], two values in a byte
//           <name>_scales     U8 (exponents)  [experts, rows, columns / 32]
//           (gpt_oss; quant_method "mxfp4"; the decoded tensor is [experts, columns, rows])
//
// Names alone prove nothing: method, names, types and shapes have to agree for every one.
//
// Thread safety: immutable values; the function is pure.
// Lifetime: refers to the step by index.
// Units: elements.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

enum class EncodingMethod : uint8_t { kFp8, kMxfp4 };

// As the model's config says it.
struct EncodingConfig {
  EncodingMethod method = EncodingMethod::kFp8;
  ScaleBlock block;
};
// The specification of MXFP4 says so.
inline constexpr ScaleBlock kMxfp4Block = {1, 32};

struct EncodedWeight {
  ParameterIndex values{};
  ParameterIndex scales{};
  std::string name;  // of the decoded tensor
  Shape shape;       // of the decoded tensor
};

// In the step's order.  kUnsupported names a tensor that does not fit, or says that there is none.
Result<std::vector<EncodedWeight>> FindEncodedWeights(const StepModel& step,
                                                      const EncodingConfig& config);

}  // namespace ckptfs
