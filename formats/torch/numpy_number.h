// SPDX-License-Identifier: Apache-2.0
//
// Numbers that stand as bytes: tensors of one element, and numbers of numpy in a pickle, which is
// numpy.core.multiarray.scalar(dtype, bytes), as numpy 1 and 2 write them.  Schedules of learning
// rates and counts of samples are such.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "core/tensor/dtype.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

using PythonNumber = std::variant<bool, int64_t, double>;

// Nothing for a dtype of no real number, for other bytes than one element has, and for an integer
// that int64 does not hold.
std::optional<PythonNumber> PythonNumberOf(DType dtype, std::string_view bytes);

// Nothing for other values, complex numbers, times, texts, longdouble and other byte orders.
std::optional<PythonNumber> NumpyNumberOf(const PickleTree& tree, const PickleNode& node);

}  // namespace ckptfs
