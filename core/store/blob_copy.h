// SPDX-License-Identifier: Apache-2.0
//
// Copies bytes that are to be the store's own, and compares them with their digests on
// the way.
//
// Thread safety: may be called concurrently.

#pragma once

#include <cstdint>
#include <vector>

#include "core/base/result.h"
#include "core/io/blob.h"
#include "core/io/root.h"

namespace ckptfs {

// Pieces that are written at once, and how large they are.
inline constexpr uint64_t kCopyThreads = 3;
inline constexpr uint64_t kCopyBytes = uint64_t{4} << 20;

// By piece of kCopyBytes: true for those that are written already, and are what the blob's
// chunks say.  Empty: none is.
using WrittenPieces = std::vector<bool>;

// The bytes of `blob.path` in `bytes` into `writer`, and closes it.  kDataLoss if they are not
// what the blob's size and chunks say.  BLOCKS: on writing them.
// REQUIRES: where something is written, room for all was reserved.
Status CopyOwnedBlob(const Root& bytes, const Blob& blob, StorageWriter& writer,
                     const WrittenPieces& written = {});

}  // namespace ckptfs
