// SPDX-License-Identifier: Apache-2.0
//
// The texts of a rank's directory: the __metadata__ of its safetensors files
// and info.json.  Both say for every tensor which part of which global tensor
// it is:
//
//   part   = { "global_shape": [..], "pieces": [piece..]
//              [, "local_shape": [..], "range": [b, e]] }
//   piece  = { "box": [[b, e]..], "at": [..] [, "scale": s] }
//
// `box` are half-open indexes of the global tensor, `at` where the box begins in
// the rank's local tensor (elements no piece covers are padding, zero), `scale`
// what the global values are multiplied by.  With `range` the file holds, as one
// dimension, the elements [b, e) of the row-major local tensor (whose shape is
// then `local_shape`), then zeros.
// Numbers that differ between data-parallel ranks are padded with spaces, so
// that the files of such ranks have one size.
//
// Thread safety: pure functions.

#pragma once

#include <map>
#include <string>

#include "core/view/shown_state.h"
#include "formats/rank/rank_tensors.h"

namespace ckptfs {

// "format", an entry per alias (as safetensors.torch.save_model writes them),
// and "ckptfs.parts": the JSON text of {key: part}.
std::map<std::string, std::string> RankMetadata(const StepModel& step,
                                                const std::vector<RankTensor>& tensors,
                                                const RankTensors& all, const RankCoordinate& rank);

std::string RankInfo(const ShownState& shown, uint64_t rank, const RankTensors& tensors);

}  // namespace ckptfs
