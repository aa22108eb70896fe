// SPDX-License-Identifier: Apache-2.0
//
// TailRunOf says how many elements of a strided tensor lie together, in row-major order: its last
// dimensions, as far as each follows the next without a gap.
//
// Thread safety: pure.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/tensor/shape.h"

namespace ckptfs {

struct TailRun {
  uint64_t elements = 1;
  size_t outer = 0;  // dimensions before it, over which the tensor has one such run each
};

inline TailRun TailRunOf(const Shape& shape, const std::vector<uint64_t>& strides) {
  TailRun run{1, shape.size()};
  while (run.outer > 0 && (shape[run.outer - 1] == 1 || strides[run.outer - 1] == run.elements)) {
    run.elements *= shape[--run.outer];
  }
  return run;
}

}  // namespace ckptfs
