// SPDX-License-Identifier: Apache-2.0
//
// ReadNear is File::ReadAt for many small ranges: those that lie close together are
// one request, and what lies between them is read along and dropped.  A request costs
// a system call, or a way to a store far away; a page more costs neither.
//
// Thread safety: pure but for reading the file.
// Units: bytes.

#pragma once

#include <cstdint>
#include <span>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

// Reads all of `ranges`, neighbours together if they stand in the order of their offsets
// (any order is read rightly, and may overlap), and returns how many requests it took.
// A few MiB are asked for in one call, and as much memory is needed beside.
// Errors as of File::ReadAt.  BLOCKS: on the device.
Result<uint64_t> ReadNear(const File& file, std::span<const ReadRequest> ranges);

}  // namespace ckptfs
