// SPDX-License-Identifier: Apache-2.0
//
// RoleOf decides whether a tensor of a model is trained, frozen or a buffer where its
// source does not say so (safetensors, torch files, DCP, old DeepSpeed files).  The
// evidence, strongest first:
//
//   an optimizer trains it        a parameter, whatever its name and dtype
//   integers or booleans          a buffer
//   a name that torch's modules   a buffer: running_mean, inv_freq, masked_bias ...; some
//   or transformers' models give  names count only with a shape or a tensor beside it
//   no optimizer trains it,       frozen
//   though there is one
//   nothing                       a parameter
//
// Views cast parameters to the layout's dtype, and keep buffers as they are.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "core/model/step_model.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// The step's optimizers say nothing of a tensor, train it, or train others alone.
enum class Trained : uint8_t { kUnknown, kYes, kNo };

// Returns true if the model has a tensor of this name.
using HasTensor = std::function<bool(std::string_view)>;

// Returns true if dtype, name or shape say that a tensor is a buffer.
bool LooksLikeBuffer(std::string_view name, DType dtype, const Shape& shape, const HasTensor& has);

Role RoleOf(std::string_view name, DType dtype, const Shape& shape, Trained trained,
            const HasTensor& has);

}  // namespace ckptfs
