// SPDX-License-Identifier: Apache-2.0
//
// A file of records (a zip) holds a checksum of each record's bytes.  Its frame is
// all the rest: headers, padding, the directory in which the checksums stand.  The digest
// of the frame (16 bytes, whatever the file's size) proves later, by reading the file
// once, that every byte of it is what it was:
//
//   frame   = for each record, by offset: offset | length | CRC-32, 8 bytes each,
//             little-endian; then all bytes of the file outside of the records
//   digest  = XXH3-128 of that
//
// One changed bit of a record contradicts its CRC-32, any changed byte elsewhere the
// digest.  Neither stops somebody who forges.
//
// Thread safety: pure but for reading the file.
// Units: bytes of the file.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/blob/record_sums.h"
#include "core/io/file.h"

namespace ckptfs {

// A frame beyond it has no digest: it is read when the file is adopted.
inline constexpr uint64_t kMaxFrameBytes = uint64_t{16} << 20;

// The zero digest if there are no records, if one has no checksum, or the frame is
// beyond the bound.  BLOCKS: on reading the frame, few requests of it.
Result<Digest> FrameDigestOf(const File& file, std::span<const FileRecord> records);

// True if every byte of the file is what it was when `frame` was the digest of its
// frame.  `records` are those that the file states now.
// BLOCKS: on reading all of it; `go_on` is asked now and then, an error ends it.
Result<bool> HoldsFrame(const File& file, const Digest& frame, std::vector<FileRecord> records,
                        const std::function<Status()>& go_on);

// Calls visit(offset, bytes) with all bytes of the file in order, a few MiB at a
// time; an error of it ends that.  BLOCKS: on reading.
Status ReadAllOf(const File& file,
                 const std::function<Status(uint64_t, std::span<const std::byte>)>& visit);

}  // namespace ckptfs
