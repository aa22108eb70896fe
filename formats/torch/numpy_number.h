// SPDX-License-Identifier: Apache-2.0
//
// Numbers of numpy in a pickle: numpy.core.multiarray.scalar(dtype, bytes), as numpy 1 and 2 write
// them.  Schedules of learning rates and counts of samples are such.
//
// Thread safety: a pure function.

#pragma once

#include <cstdint>
#include <optional>
#include <variant>

#include "formats/torch/pickle_value.h"

namespace ckptfs {

using NumpyNumber = std::variant<bool, int64_t, double>;

// Nothing for other values: complex numbers, times, texts, longdouble, other byte orders, and what
// int64 does not hold.
std::optional<NumpyNumber> NumpyNumberOf(const PickleTree& tree, const PickleNode& node);

}  // namespace ckptfs
