// SPDX-License-Identifier: Apache-2.0
//
// A chunk list has the digests of a blob's chunks in a file of its own, in the blob's directory.
// So a manifest, which has the list's digest alone, does not grow with the bytes of its step.
//
//   list   = digest*                16 bytes for each chunk (chunk_digests.h), in order
//   digest = high(8) | low(8)       little-endian
//   name   = <hex of the XXH3-128 of the list>.digests
//
// The list's digest alone proves a blob: whoever has read all of it makes the list anew.  The file
// tells which chunk is wrong, and proves chunks one by one.  So no reader of a step needs it.
//
// A list is durable before a manifest names it, and goes with its directory.  Its name says what
// it holds: to write it again, beside whomever, changes nothing.
//
// Thread safety: the functions may be called concurrently.
// Units: bytes.

#pragma once

#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/blob.h"
#include "core/io/root.h"

namespace ckptfs {

// A blob of at most so many chunks has their digests, 32 bytes, in the manifest.
inline constexpr size_t kInlineChunks = 2;

inline bool NeedsChunkList(const Blob& blob) { return blob.chunks.size() > kInlineChunks; }

// Where the blob's list lies, below the blob's root.  REQUIRES: blob.chunk_list.
std::string ChunkListPath(const Blob& blob);

// The digests of the blob's list.  kNotFound and kDataLoss name the file, that is missing or is not
// what the manifest says.  REQUIRES: blob.chunk_list.
Result<std::vector<Digest>> ReadChunkList(const Root& root, const Blob& blob);

// Writes the list of the blob, whose root is the directory `root` of the storage, durably.
// REQUIRES: blob.chunk_list, of blob.chunks.
Status PutChunkList(Storage& storage, std::string_view root, const Blob& blob);

}  // namespace ckptfs
