// SPDX-License-Identifier: Apache-2.0
//
// Copies bytes that are to be the store's own, and compares them with their digests on
// the way.
//
// Thread safety: may be called concurrently.

#pragma once

#include "core/base/result.h"
#include "core/blob/blob.h"
#include "core/io/root.h"

namespace ckptfs {

// Pieces that are written at once, and how large they are.
inline constexpr uint64_t kCopyThreads = 3;
inline constexpr uint64_t kCopyBytes = uint64_t{4} << 20;

// The bytes of `blob.path` in `bytes` into `writer`, and closes it.  kDataLoss if they are not
// what the blob's size and chunks say.  BLOCKS: on writing them.
Status CopyOwnedBlob(const Root& bytes, const Blob& blob, StorageWriter& writer);
// The end of that.
Status CloseOwnedBlob(StorageWriter& writer);

}  // namespace ckptfs
