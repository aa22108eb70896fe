// SPDX-License-Identifier: Apache-2.0
//
// UniversalCut says how DeepSpeed's universal loader (0.19.7,
// checkpoint/universal_checkpoint.py) cuts a full tensor for a tensor-parallel
// rank: the keys beside 'param' in zero/<name>/<state>.pt, and the pattern
// lists of universal_checkpoint_info that say the same.
//
//   replicated       no keys; shapes are equal
//   dim 0 or dim 1   cat_dim
//   vocabulary       cat_dim 0, vocab_tensor (the loader pads with zeros)
//   n equal parts    cat_dim, param_n_sub_params
//   unequal parts    sub_param_shape (a SubparamShape whose cut dim is a tuple)
//
// An AutoTP engine ignores them all: it cuts by what it knows of its own
// layers, and wants the full tensor.
//
// Thread safety: immutable values; the functions are pure.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::deepspeed {

struct UniversalCut {
  enum class Kind { kUnknown, kReplicated, kAlong, kVocabulary, kEqualParts, kParts };
  Kind kind = Kind::kUnknown;
  uint32_t dim = 0;
  std::vector<uint64_t> parts;  // kEqualParts, kParts
  bool operator==(const UniversalCut&) const = default;
};

// kUnsupported: the loader has no words for the pattern (several dims, padding
// along another dim than 0, a scaled bias).
Result<UniversalCut> CutOf(const Parameter& parameter);

// The keys beside 'param', in the order the stock converter writes them.
using PickleItems = std::vector<std::pair<NodeId, NodeId>>;
PickleItems CutKeys(const UniversalCut& cut, const Shape& shape, PickleBuilder& builder);

// Those of a 0-d tensor.  The loader of stages 1 and 2 chunks along a dim, which such a tensor does
// not have, unless sub_param_shape gives it one: (1,), of which every rank takes all.
PickleItems KeysOfNumber(PickleBuilder& builder);

}  // namespace ckptfs::deepspeed
