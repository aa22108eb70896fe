// SPDX-License-Identifier: Apache-2.0
//
// The safetensors header, read and written (safetensors 0.8 tensor.rs):
//
//   file   = u64 n (little-endian) | n bytes of JSON, space-padded | data
//   JSON   = { "__metadata__": {text: text}, name: {"dtype","shape","data_offsets":[b,e)} }
//   rules  : n <= 100,000,000; ranges sorted by offset are contiguous from 0
//            without holes; e - b = bytes of shape x dtype; 8 + n + last e =
//            file length; names are unique.
//
// Our writer pads the header so that data starts at byte 4096 or a multiple of it.
//
// Thread safety: values and pure functions.
// Units: bytes; offsets are relative to the start of the data.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct SafetensorsEntry {
  std::string name = {};
  DType dtype = DType::kF32;
  Shape shape = {};
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> entries;  // in file order
  uint64_t data_offset = 0;               // 8 + n
};

inline constexpr uint64_t kSafetensorsMaxHeader = 100'000'000;

// Parse the first bytes of a file of `file_size`; `head` must hold at least
// 8 + n bytes (read 8 first: SafetensorsHeaderLength).  kInvalid names the rule.
Result<uint64_t> SafetensorsHeaderLength(std::string_view first_eight, uint64_t file_size);
Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view head, uint64_t file_size);

// Assigns begin/end in order (each tensor's start aligned as the rules force:
// no holes) and renders the header, padded so that data starts on a multiple
// of 4096.  Entries' order is kept; the caller orders by alignment if it cares.
Result<std::string> RenderSafetensorsHeader(const std::map<std::string, std::string>& metadata,
                                            std::vector<SafetensorsEntry>& entries);
// The length RenderSafetensorsHeader would return, without rendering.
Result<uint64_t> SafetensorsHeaderSize(const std::map<std::string, std::string>& metadata,
                                       const std::vector<SafetensorsEntry>& entries);

}  // namespace ckptfs
