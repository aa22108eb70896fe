// SPDX-License-Identifier: Apache-2.0
//
// A stored weight is its stored master, cast: frameworks copy masters into
// weights after every optimizer step, rounding to the nearest even value, and a
// step that is skipped (overflow) changes neither.  Where both are in a step's
// files, one proves the other: files of two ranks that were exchanged, a file
// that is there twice, names given to the wrong bytes of equal shape.
//
//   compared   copy by copy where both have as many, else the first copies
//   equal      the same bits; any two NaN; two zeros; for bf16 and fp32 two
//              values that are subnormal or zero (processors may flush those)
//   not        averaged atoms of which weight and master have unequal numbers
//              of copies: a mean rounds elsewhere; all of a step before whose first
//              optimizer step the masters were changed (StepModel::weights_apart)
//
// Thread safety: pure functions but for reading.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct WeightPair {
  AtomIndex weight{};
  AtomIndex master{};
  uint32_t copies = 1;  // to compare, from the first on
};

struct WeightPairs {
  std::vector<WeightPair> compared;
  std::vector<AtomIndex> skipped;  // weights that cannot be compared exactly
};

// The weights that are stored beside their masters.
WeightPairs FindWeightPairs(const StepModel& model);

// How many elements of two arrays of type `dtype` are not equal, and the first.
// REQUIRES: CanCompare(dtype); as many bytes in both.
struct Difference {
  uint64_t count = 0;
  uint64_t first = 0;
};
Difference FindDifference(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b);
bool CanCompare(DType dtype);

// "0.15625": one element as text.
std::string ElementText(DType dtype, std::span<const std::byte> element);

// The atom's row-major element that is element `flat` of a local tensor; nothing
// for padding.
std::optional<uint64_t> AtomElement(const LocalTensor& local, const Shape& atom, uint64_t flat);

// Compares up to 8,192 samples of up to 128 elements: first of every file that
// holds masters, then of every weight on every rank, then more of the same.
// kDataLoss names the parameter, the element and both files; other errors are
// those of reading.  Returns how many elements were compared.
// BLOCKS: on reading them.
Result<uint64_t> CheckWeightSample(const StepModel& model, BlobReader& blobs);

}  // namespace ckptfs
