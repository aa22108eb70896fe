// SPDX-License-Identifier: Apache-2.0
//
// RankEntry is what a rank file says of itself: its entry in __metadata__, parsed and
// compared with the tensors that are there.
//
// Thread safety: values and pure functions.
// Lifetime: entries are the header's, by value.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/blob/safetensors_header.h"
#include "core/io/file.h"
#include "core/model/step_model.h"
#include "core/state/state_part.h"

namespace ckptfs {

struct StateTensor {
  SafetensorsEntry entry;
  std::string parameter;
  std::string kind;
  std::string optimizer;
  bool number = false;
  std::optional<StatePart> part;  // absent: the whole state
  // The directory of the save whose file has the bytes; empty: this file, at entry's range.
  std::string kept;
  const Shape& whole() const { return part ? part->shape : entry.shape; }
};

struct RankGroup {
  std::string optimizer;
  std::vector<std::string> parameters;
  SafetensorsEntry pickle;
};

struct RankDocument {
  std::string key;
  std::string scope;
  SafetensorsEntry pickle;
  std::vector<SafetensorsEntry> tensors;
};

struct RankEntry {
  uint64_t rank = 0;
  uint64_t world = 0;
  uint64_t step = 0;
  std::string framework;
  std::string framework_version;
  std::string layout;                // empty: none is given
  std::vector<StateTensor> tensors;  // in file order, then what is kept elsewhere, by key
  std::vector<std::pair<std::string, Role>> parameters;
  std::vector<std::pair<std::string, std::string>> aliases;  // alias, name
  std::vector<RankGroup> groups;
  std::vector<RankDocument> documents;
  std::vector<std::pair<std::string, uint64_t>> alike;  // digest of equal parts, ranks
  uint64_t data_offset = 0;
  uint64_t unproved = 0;  // bytes of which a write could have gone unseen (kUnprovedKey)
};

// The header of a rank's file, or of an earlier one.  BLOCKS: on reading it.
Result<SafetensorsHeader> HeaderOf(const File& file);

// kInvalid names the rule.
Result<RankEntry> ParseRankEntry(const SafetensorsHeader& header);

}  // namespace ckptfs
