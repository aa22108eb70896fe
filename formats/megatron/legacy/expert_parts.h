// SPDX-License-Identifier: Apache-2.0
//
// ExpertParts says where a rank's tensor of experts lies in the tensor of all experts of its layer,
// [experts, rows, columns], or [experts, rows] of biases (moe/experts.py of core 0.16.1):
//
//   linear_fc1   experts' tensor ranks have equal runs of its rows; of a gated one equal runs of
//                each half, gate and up
//   linear_fc2   they have equal runs of its columns; each has all of its bias
//   grouped      all experts of the rank, transposed: weight1 is [hidden, experts * rows], which is
//                computed with as [experts, hidden, rows]; weight2 [experts * columns, hidden]
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstdint>

#include "core/base/result.h"
#include "core/tensor/piece.h"
#include "formats/megatron/legacy/local_names.h"

namespace ckptfs::megatron {

struct ExpertCut {
  uint32_t all = 1;    // experts of a layer
  uint32_t local = 1;  // of a rank
  uint32_t etp = 1;    // tensor ranks of experts
  bool gated = false;  // linear_fc1 is; where there are several of these
};

struct ExpertPart {
  Shape whole;
  LocalTensor local;
  uint32_t first = 0;  // expert
  bool replicated = false;
};

// kInvalid if the shape is not one of such a tensor.
Result<ExpertPart> ExpertPartOf(const ExpertCut& cut, const LocalName& name, const RankPlace& place,
                                const Shape& shape);

}  // namespace ckptfs::megatron
