// SPDX-License-Identifier: Apache-2.0
//
// The policy: how a file is served when it is opened and nothing about it is
// live yet (docs/semantics.md, "How bytes are served").
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fs/filesystem.h"

namespace ckptfs {

// Smaller files are streamed: the page cache keeps them after one or two
// requests, and neither a fill nor a kernel backing id pays off.
inline constexpr uint64_t kSmallFile = uint64_t{1} << 20;

struct ServingQuestion {
  uint64_t size = 0;
  bool whole_blob = false;    // the file is a source file, byte for byte
  bool passthrough = false;   // the kernel and our privileges allow it
  bool materialise = false;   // there is a pool of huge pages
  uint64_t budget = 0;        // of that pool
  std::optional<ServingMode> forced;
};

struct ServingChoice {
  ServingMode mode = ServingMode::kStream;
  std::string_view reason;  // a literal
};

ServingChoice ChooseServing(const ServingQuestion& question);

}  // namespace ckptfs
