// SPDX-License-Identifier: Apache-2.0
//
// AffineMap reads the `affine_map` of universal_checkpoint_info, version 1: how
// each parameter was spread over the tensor-parallel ranks, as strided blocks
// of the full tensor and of the shard (deepspeed 0.19.7 checkpoint/affine.py,
// written by AutoTP engines).  It beats the pattern lists beside it: they name
// the kind of a cut, this names its offsets, uneven ones too.
//
//   affine_map = {"version": 1, "params": {regex: {"logical_shape": [n...],
//                "ranks": {r: {"shard_shape": [n...], "pieces": [piece...]}}}}}
//   piece      = {"shape", "source": [offset, strides], "dest": [offset, strides],
//                 "locations": [rank...], "scale": number (absent: 1)}
//   shard[dest] = full[source] * scale; the regex is ^re.escape(name)$
//
// Thread safety: immutable once parsed.
// Lifetime: owns what it holds.
// Units: elements.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/piece.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

struct AffineParameter {
  Shape logical_shape;
  std::vector<LocalTensor> ranks;  // by tp rank
  bool replicated = false;         // every rank holds all of it, unscaled or equally scaled
};

class AffineMap {
 public:
  // `info` is universal_checkpoint_info; an info without a map gives an empty
  // one.  kUnsupported for another version, kInvalid for a piece that is not a box
  // of the full tensor or leaves it or its shard.
  static Result<AffineMap> Parse(PickleRef info);

  bool empty() const { return parameters_.empty(); }
  // By the parameter's own name; null when the map does not mention it.
  const AffineParameter* Find(std::string_view parameter) const;

 private:
  std::map<std::string, AffineParameter, std::less<>> parameters_;
};

}  // namespace ckptfs
