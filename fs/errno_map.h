// SPDX-License-Identifier: Apache-2.0
//
// ErrnoOf gives the errno of an Error that leaves through the kernel.  The table is
// part of docs/reference/semantics.md and a test compares the two.
//
//   kInvalid      EINVAL      kStale        ESTALE
//   kNotFound     ENOENT      kDataLoss     EIO
//   kExists       EEXIST      kPermission   EACCES
//   kUnsupported  EOPNOTSUPP  kExhausted    ENOMEM
//   kIo           EIO         kInternal     EIO
//
// Requests that would write are answered kReadOnlyErrno before they get here.
//
// Thread safety: pure functions.

#pragma once

#include "core/base/result.h"

namespace ckptfs {

// EROFS: the answer to every request that would change something.
extern const int kReadOnlyErrno;

// Positive errno.
int ErrnoOf(ErrorCode code);
inline int ErrnoOf(const Error& error) { return ErrnoOf(error.code); }

}  // namespace ckptfs
