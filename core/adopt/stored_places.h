// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of atoms and of documents' tensors lie in files, for who writes them anew.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/model/step_model.h"

namespace ckptfs {

// [begin, end) of a file.
struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Sorted, and those that touch are one.
std::vector<ByteRange> MergedRanges(std::vector<ByteRange> ranges);

// From the first byte to past the last one of a document's tensor; none if it has no elements, or
// is an atom.
std::optional<ByteRange> RangeOf(const StoredTensor& tensor);

// The one fragment that is all of the atom, in its own dtype; none if there is no such.
std::optional<Fragment> WholeFragment(const Atom& atom);

// Some rank held a multiple of its part.
bool IsScaled(const Gather& gather);

}  // namespace ckptfs
