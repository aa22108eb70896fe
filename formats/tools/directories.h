// SPDX-License-Identifier: Apache-2.0
//
// Functions over directories that several frameworks share.
//
// Thread safety: pure but for looking at files.

#pragma once

#include <cstdint>
#include <string>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

// Newest modification of a directory and its direct entries, or of a file.
Result<int64_t> NewestEntry(const Root& root, const std::string& path);

}  // namespace ckptfs
