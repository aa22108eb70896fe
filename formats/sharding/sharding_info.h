// SPDX-License-Identifier: Apache-2.0
//
// ShardingInfo is `universal_checkpoint_info` as DeepSpeed 0.19.7 understands
// it (checkpoint/constants.py, ds_to_universal.py merge_tp_slices): lists of
// regular expressions that say how each parameter is spread over tensor-parallel
// ranks.  Patterns match like Python's re.match: from the start, anywhere to.
//
// Thread safety: immutable once parsed.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"
#include "formats/sharding/affine_map.h"
#include "formats/sharding/name_pattern.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

// One entry of parameter_with_sub_params.
struct InfoSubParams {
  std::vector<NamePattern> patterns;
  uint32_t dim = 0;
  std::vector<uint64_t> sizes;  // of the sub-parameters in the whole dim
  uint64_t count = 0;           // sizes empty: that many equal ones (before version 0.4)
};

struct ShardingInfo {
  double version = 0;
  std::vector<NamePattern> replicated;
  std::vector<NamePattern> averaged;
  std::vector<NamePattern> row;
  std::vector<NamePattern> vocabulary;
  std::vector<NamePattern> two_parts;
  std::vector<NamePattern> pipeline_replicated;
  std::vector<NamePattern> experts;
  std::vector<InfoSubParams> sub_params;
  // By pattern text: per sub-parameter its rows on each rank.
  std::map<std::string, std::vector<std::vector<uint64_t>>> widths;
  // AutoTP wrote it: its lists say what its own layers hold, and what those do
  // not cut is called replicated.
  bool autotp = false;
  std::vector<std::pair<NamePattern, std::string>> unsupported;  // with the reason
  AffineMap affine;    // beats the lists: it has the offsets
  bool lists = false;  // those of tensor parallelism are there, empty ones too
  std::optional<uint64_t> original_vocabulary;
  std::optional<uint64_t> padded_vocabulary;

  // True if it says anything of tensor parallelism: then a parameter in no
  // list is cut along dim 0, as the stock converter takes it.
  bool DeclaresTensorParallel() const;
};

// kInvalid names the key.
Result<ShardingInfo> ParseShardingInfo(PickleRef info);

// The first that matches.
const NamePattern* FirstMatch(const std::vector<NamePattern>& patterns, std::string_view name);

}  // namespace ckptfs
