// SPDX-License-Identifier: Apache-2.0
//
// The policy: how a file is served when it is opened and nothing about it is
// live yet (docs/reference/semantics.md, "How bytes are served").
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fs/types.h"

namespace ckptfs {

// Smaller files are streamed: the page cache keeps them after one or two
// requests, and neither a fill nor a kernel backing id pays off.
inline constexpr uint64_t kSmallFile = uint64_t{1} << 20;

struct ServingQuestion {
  uint64_t size = 0;
  bool whole_blob = false;   // the file is a source file, byte for byte
  bool passthrough = false;  // the kernel and our privileges allow it
  bool materialise = false;  // there is a pool of huge pages
  bool filled = false;       // the file lies in it already
  bool read_once = false;    // its framework's loader reads it once
  uint64_t budget = 0;       // of that pool
  std::optional<ServingMode> forced;
};

struct ServingChoice {
  ServingMode mode = ServingMode::kStream;
  std::string_view reason;  // a literal
};

ServingChoice ChooseServing(const ServingQuestion& question);

// True for files whose readers copy them once into their own memory with reads
// (torch.load), rather than map them (safetensors): if such a file is streamed,
// the page cache only adds a copy and a page per 4 KiB.
bool ReadByCopy(Reading reading, uint64_t size);

}  // namespace ckptfs
