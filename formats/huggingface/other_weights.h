// SPDX-License-Identifier: Apache-2.0
//
// Weights of another form beside those that loaders take: a save leaves what an earlier one of
// another form wrote (model.safetensors, pytorch_model.bin, shards), and loaders may take that
// first.
//
// Thread safety: pure but for reading files.

#pragma once

#include <optional>
#include <span>
#include <string>

#include "core/base/result.h"
#include "core/io/root.h"
#include "formats/huggingface/reader.h"
#include "formats/huggingface/weights_file.h"

namespace ckptfs::huggingface {

// The file of weights, or the index, of another form that is newer than what is taken and does not
// hold the same: names and shapes are compared, and samples, those of a wider type cast.  More
// tensors than are taken (tied heads, masks) make no difference.  "" without one.
// `taken`: contents of files.weights.  BLOCKS: on reading headers and the sample.
Result<std::string> NewerWeights(const Root& root, const StepFiles& files,
                                 std::span<const WeightsFile> taken);

// True if the step's optimizer was written after `newer`, so it trains those and not what is taken.
Result<bool> TrainsOther(const Root& root, const StepFiles& files, const std::string& newer);

// kInvalid for shards of two saves: each holds tensors of one type, not all of them the same, and
// they are not as many bytes as the index says.  Either alone is common: total_size is often wrong,
// and models keep a few tensors in fp32.  BLOCKS: on reading the index.
Status CheckOneType(const Root& root, const StepFiles& files, std::span<const WeightsFile> taken);

}  // namespace ckptfs::huggingface
