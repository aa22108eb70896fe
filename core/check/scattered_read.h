// SPDX-License-Identifier: Apache-2.0
//
// ReadScattered reads many small runs of a step's files into one buffer: file
// by file in offset order, neighbours in one call, many files at a time, and
// nothing read ahead between them.  A file that is not, or does not stay, what
// its stamp says is an error.
//
// Thread safety: may be called concurrently.
// Units: bytes.

#pragma once

#include <cstdint>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"

namespace ckptfs {

// Bytes of one file and where they go.
struct ScatteredPiece {
  uint32_t blob = 0;
  uint32_t length = 0;
  uint64_t offset = 0;
  uint64_t destination = 0;  // of the buffer
};

// Sorts the pieces, reads them to `buffer`, and returns the calls it took.
// Errors as of BlobReader::Open and File::ReadAt.
// BLOCKS: on reading.
Result<uint64_t> ReadScattered(BlobReader& blobs, std::vector<ScatteredPiece>& pieces,
                               unsigned threads, char* buffer);

// The blobs that sorted pieces lie in, each once, in order.
std::vector<uint32_t> BlobsOf(const std::vector<ScatteredPiece>& pieces);

}  // namespace ckptfs
