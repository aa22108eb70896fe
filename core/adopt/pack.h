// SPDX-License-Identifier: Apache-2.0
//
// PackSmallPieces reads the atoms of a step that lie in many small pieces and
// makes the bytes of its side blob of them: a safetensors file with the keys
// "<kind>/<name>" ("<optimizer>/<kind>/<name>" where the optimizer has a name).
//
//   packed   an atom that is gathered, or the first of whose replicas is, from
//            at least 16 fragments of at most 4 KiB on average, in its own dtype,
//            unscaled and in dense runs
//   bound    64 MiB or 1/10,000 of the source's bytes, whichever is more, and
//            never more than 1 GiB; beyond it the smallest fragments first
//
// Files are read one by one in offset order, many of them at a time.
//
// Thread safety: may be called concurrently.
// Units: bytes.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/io/file.h"
#include "core/model/side_blob.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct PackOptions {
  uint64_t limit = 0;     // of the data; 0: the bound above
  unsigned threads = 32;  // files read at a time
};

struct Packing {
  std::vector<SideAtom> atoms;  // empty: nothing is worth it, and no file
  std::string bytes;            // the side blob
  OwnerAndMode access;          // the tightest of the files that were read
  uint64_t pieces = 0;          // runs of bytes that were gathered
  uint64_t reads = 0;           // by so many requests
};

// kStale if one is not or does not
// stay what its stamp says; kDataLoss, kNotFound, kPermission, kIo as reading
// them goes.
// BLOCKS: on reading.  Memory: the side blob and 24 bytes a piece.
Result<Packing> PackSmallPieces(const StepModel& model, BlobReader& blobs,
                                const PackOptions& options);

}  // namespace ckptfs
