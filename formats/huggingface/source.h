// SPDX-License-Identifier: Apache-2.0
//
// Hugging Face checkpoints as a Source: a directory that from_pretrained loads, a
// Trainer's output with its checkpoint-N, a model of the hub's cache with its
// snapshots, or one file of weights (.safetensors, .bin, .pt, .pth).
//
// A directory is its own save directory; of a Trainer the output is, and of the
// hub's cache the model's folder, whose snapshots are links into blobs/.
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeHuggingFaceSource();

}  // namespace ckptfs
