// SPDX-License-Identifier: Apache-2.0
//
// Read-ahead for plans: asks the kernel for what a range of a virtual file is
// gathered from, so that the device works while earlier bytes are copied.  The
// kernel's own read-ahead cannot: it sees mapped files, in pieces and strides.
//
// Thread safety: pure functions of immutable values; the reader is shared.
// Units: bytes of the virtual file.

#pragma once

#include <cstdint>

#include "core/blob/blob_reader.h"
#include "core/view/plan.h"

namespace ckptfs {

// Start reading the sources of [offset, offset + length) into the page cache,
// unless a look at a few of their pages finds them there.  Only a hint: what
// fails here fails again, with its reason, when it is read.
// REQUIRES: plan.Validate(model) succeeded.
void ReadAhead(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset,
               uint64_t length);

// The same where some file cannot be mapped, for a caller about to read [offset,
// offset + length): all that the read needs is on its way before its first part
// is waited for, and, of a `bulk` read, what the next ones will need: nothing
// else hides how far away the storage is.
void RequestFar(const Plan& plan, const StepModel& model, BlobReader& blobs, uint64_t offset,
                uint64_t length, bool bulk);

}  // namespace ckptfs
