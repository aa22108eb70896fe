// SPDX-License-Identifier: Apache-2.0
//
// Fragments say where the bytes of a local tensor lie: a flat range of the
// row-major local tensor at an extent of a blob, in a dtype.  Fragments that
// form arithmetic series over ranks are stored as one FragmentSeries, so that
// the index of 1,024 ranks is as small as that of one.
//
// Thread safety: immutable values.
// Units: flat ranges are elements of the local tensor; offsets are bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/io/blob.h"
#include "core/tensor/dtype.h"
#include "core/tensor/piece.h"

namespace ckptfs {

class BoxIndex;

struct Fragment {
  uint64_t flat_begin = 0;  // [flat_begin, flat_end) of the local tensor
  uint64_t flat_end = 0;
  BlobIndex blob{};
  uint64_t offset = 0;  // byte of the blob where element flat_begin is stored
  DType dtype = DType::kF32;
  bool operator==(const Fragment&) const = default;
};

// `count` fragments; the k-th starts at flat_begin + k * flat_step, lies in
// blob + k * blob_step at offset + k * offset_step and has `elements` elements.
// flat_step is never smaller than elements.
struct FragmentSeries {
  uint32_t local = 0;  // into Gather::locals
  uint32_t count = 1;
  uint64_t flat_begin = 0;
  uint64_t flat_step = 0;
  uint64_t elements = 0;
  uint32_t blob = 0;
  int64_t blob_step = 0;
  uint64_t offset = 0;
  int64_t offset_step = 0;
  DType dtype = DType::kF32;
  bool operator==(const FragmentSeries&) const = default;

  Fragment At(uint32_t k) const {
    return Fragment{flat_begin + k * flat_step, flat_begin + k * flat_step + elements,
                    BlobIndex{static_cast<uint32_t>(blob + static_cast<int64_t>(k) * blob_step)},
                    offset + static_cast<uint64_t>(static_cast<int64_t>(k) * offset_step), dtype};
  }
};

// Fragments that together cover an atom exactly once.  `series` is sorted by
// (local, flat_begin) and no two fragments of one local tensor overlap.
struct Gather {
  std::vector<LocalTensor> locals;
  std::vector<FragmentSeries> series;
  // The index of the locals, made by StepModel::BuildIndex; null: readers look at all of them.
  std::shared_ptr<const BoxIndex> index = {};
  bool operator==(const Gather& other) const {
    return locals == other.locals && series == other.series;
  }
};

}  // namespace ckptfs
