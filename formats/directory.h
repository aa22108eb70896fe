// SPDX-License-Identifier: Apache-2.0
//
// Looking into directories so that a failing disk is an error, never a
// checkpoint that seems to be smaller or not there.
//
// Thread safety: pure but for reading directories.

#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

// The names in a directory, sorted, without "." and "..".
Result<std::vector<std::string>> ListNames(const std::string& directory);

// What is at `path` (symbolic links followed); never nothing.
Result<std::optional<struct stat>> StatOf(const std::string& path);
// The same, or nothing if there is nothing that we can see: no such name, a
// link that leads nowhere or where we may not go.
Result<std::optional<struct stat>> StatIfThere(const std::string& path);

// A torch file by its path.
Result<TorchFile> OpenTorch(const std::string& path);

// Newest modification of a directory and its direct entries, or of a file.
Result<int64_t> NewestEntry(const std::string& path);

// "500" of "checkpoint-500", which transformers' Trainer saves into its output;
// nothing for other names.
std::optional<uint64_t> TrainerIteration(std::string_view name);

Result<bool> IsDirectory(const std::string& path);
Result<bool> IsRegularFile(const std::string& path);

}  // namespace ckptfs
