// SPDX-License-Identifier: Apache-2.0
//
// Tells a failure of the machine from one of the file that was read: the first says nothing of the
// file, so that no reader may take it for "not of my format" or "not there".
//
// Thread safety: pure function.

#pragma once

#include "core/base/result.h"

namespace ckptfs {

// True if the device, or the memory and descriptors of the process, failed.
inline bool IsOfDevice(const Error& error) {
  return error.code == ErrorCode::kIo || error.code == ErrorCode::kExhausted;
}

}  // namespace ckptfs
