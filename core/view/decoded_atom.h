// SPDX-License-Identifier: Apache-2.0
//
// Decoded atoms are stored as values with one scale per block (fp8 and other
// quantised weights): element = value * scale in fp32.  Scales form a tensor
// with one element per block, blocks at the end of a dim being cut short.
//
// Thread safety: pure apart from the blob reader.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/tensor/piece.h"
#include "core/view/stored_atom.h"

namespace ckptfs {

// The atoms of values and scales exist, have shapes that fit the block, and
// types that can be decoded.
Status CheckDecoded(const StepModel& model, const Atom& atom);

// As ReadAtom, for an atom of SourceKind::kDecode.
// BLOCKS: on the device where the page cache is cold.
Status ReadDecoded(const StepModel& model, BlobReader& blobs, const StoredAtom& stored,
                   const LocalTensor& local, uint64_t begin, uint64_t end, std::byte* out);

}  // namespace ckptfs
