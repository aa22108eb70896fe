// SPDX-License-Identifier: Apache-2.0
//
// Blob describes an immutable run of bytes readable at any offset: a source
// file, later an object or a region of shared memory.
//
// Thread safety: value types.
// Units: bytes; times are nanoseconds since the epoch.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/digest.h"

namespace ckptfs {

enum class BlobIndex : uint32_t {};  // into StepModel::blobs

// [begin, end) bytes of a blob.
struct Extent {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The marks by which an adopted file is known again.
struct BlobStamp {
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;  // 0: not compared (hard links of the store)
  uint64_t inode = 0;
  bool operator==(const BlobStamp&) const = default;

  // Nothing but the size is compared: of bytes that only the store can write.
  bool size_only() const { return mtime_ns == 0 && ctime_ns == 0 && inode == 0; }
};

// A blob is *adopted* (others may write it: its stamp tells whether they did) or
// *owned* (only the store writes it: its size, and the digests of its chunks,
// which a store that is moved or copied takes along).
struct Blob {
  uint32_t root = 0;  // into StepModel::roots; roots are mapped per mount
  std::string path;   // relative to the root; never absolute, never with ".."
  BlobStamp stamp;
  Digest fingerprint;  // of some blocks (core/blob/fingerprint.h)
  Digest content;      // of all bytes; zero until verify or compact
  uint32_t mode = 0;   // st_mode permission bits when adopted
  uint32_t uid = 0;
  uint32_t gid = 0;
  bool store_owned = false;    // in the store's own blob directory
  bool side = false;           // copies of small pieces (core/model/side_blob.h)
  Digest frame;                // of what lies between its records (core/blob/frame.h); zero: none
  uint64_t chunk_bytes = 0;    // 0: no digests of chunks
  std::vector<Digest> chunks;  // of every chunk_bytes of it, the last may be shorter
  // The digest of these digests, where a file of the store has them and not `chunks`
  // (core/blob/chunk_list.h).
  Digest chunk_list;

  bool owned() const { return store_owned && stamp.size_only(); }
};

}  // namespace ckptfs
