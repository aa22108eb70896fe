// SPDX-License-Identifier: Apache-2.0
//
// ReadAtom fills a buffer with elements of a target local tensor of an atom:
// gathered from fragments, averaged over slices or taken from the
// manifest, multiplied by the ratio of the pieces' scales, cast.  Elements that
// no piece maps, and those beyond the local tensor, are zero.
//
//   average   0 + slice 0 + slice 1 + ... in fp32, divided by their number
//             (ds_to_universal.py: sum(slices) / len(slices)), then cast
//   scaled    value * the scale of its block in fp32 (scaled_atom.h), then cast
//
// Thread safety: pure apart from the blob reader.
// Units: elements of the local tensor.

#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/view/segment.h"

namespace ckptfs {

// `out` has (end - begin) * ByteWidth(segment.dtype) bytes; begin and end count
// from the start of the local tensor.
// REQUIRES: a segment that Plan::Validate accepts, not of a sub-byte dtype.
// BLOCKS: on the device where the page cache is cold.
Status ReadAtom(const StepModel& model, BlobReader& blobs, const AtomSegment& segment,
                uint64_t begin, uint64_t end, std::byte* out);

// Bytes [begin, end) of a whole sub-byte atom.
Status ReadPackedAtom(const StepModel& model, BlobReader& blobs, const AtomSegment& segment,
                      uint64_t begin, uint64_t end, std::byte* out);

}  // namespace ckptfs
