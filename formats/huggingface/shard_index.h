// SPDX-License-Identifier: Apache-2.0
//
// The index of sharded weights, read and written (transformers utils/hub.py,
// huggingface_hub serialization/_base.py):
//
//   {"metadata": {"total_size": bytes, ...}, "weight_map": {tensor: file}}
//
// Read: files are plain names in the same directory; a tensor is named once.
// Other keys are ignored; total_size is often wrong, and proves nothing by itself.
// Split: in order, a new file where the limit would be passed, a tensor that is
// larger by itself.
//
// Thread safety: values and pure functions, but for reading a file.
// Units: bytes.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs::huggingface {

// Files by tensor.
using WeightMap = std::map<std::string, std::string, std::less<>>;

inline constexpr uint64_t kMaxIndexBytes = 256 << 20;
inline constexpr uint64_t kMaxShardBytes = 5'000'000'000;  // huggingface_hub's "5GB"

// kInvalid names the rule.
Result<WeightMap> ParseShardIndex(std::string_view json);
// The index in a file; errors name it.  BLOCKS: on reading.
Result<WeightMap> ReadShardIndex(const Root& root, const std::string& path);

// metadata.total_size of an index in a file, in bytes; nothing if it does not say, or is not an
// index. BLOCKS: on reading.
Result<std::optional<uint64_t>> ReadTotalSize(const Root& root, const std::string& path);

// How many of tensors of these sizes each shard has, in order; one shard or none
// needs no index.
std::vector<size_t> SplitShards(std::span<const uint64_t> sizes, uint64_t limit = kMaxShardBytes);

// "model.safetensors", or "model-00002-of-00003.safetensors" of several; from 0.
std::string ShardName(size_t shard, size_t shards);

// As transformers prints it.  kUnsupported for names that are not UTF-8.
Result<std::string> PrintShardIndex(const WeightMap& map, uint64_t total_size,
                                    uint64_t total_parameters);

}  // namespace ckptfs::huggingface
