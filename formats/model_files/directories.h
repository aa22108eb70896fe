// SPDX-License-Identifier: Apache-2.0
//
// What several frameworks' directories have in common.
//
// Thread safety: pure but for looking at files.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/ingest/source.h"
#include "core/io/root.h"

namespace ckptfs {

// Newest modification of a directory and its direct entries, or of a file.
Result<int64_t> NewestEntry(const Root& root, const std::string& path);

// "500" of "checkpoint-500", which transformers' Trainer saves into its output;
// nothing for other names.
std::optional<uint64_t> TrainerIteration(std::string_view name);

// Of a checkpoint-N in which what was written last is of `mtime_ns`: rank 0 of the Trainer
// writes its state when all else of its own is there.
Result<Seal> TrainerSeal(const Root& root, const std::string& directory, int64_t mtime_ns);

}  // namespace ckptfs
