// SPDX-License-Identifier: Apache-2.0
//
// StatsOfAtoms reads atoms whole, in blocks and on several threads, and says what their numbers
// are like.  It reads them as a view shows them: unsharded, averages computed.
//
//   elements = finite + nan + infinite; zeros (of either sign) are finite
//   min, max, mean, std   of the finite elements; std is the population's (numpy's)
//
// min and max are exact.  mean and std are added up in blocks in the atom's order, whatever the
// threads do, so that the same bytes give the same result.
//
// Thread safety: may be called concurrently.
// Lifetime: model and blobs must outlive the call.
// Memory: a block per thread, and some bytes per 4 MiB of the atoms.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/inspect/tensor_values.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct TensorStats {
  uint64_t elements = 0;
  bool numbers = false;  // else nothing below is known (complex, packed)
  uint64_t finite = 0;
  uint64_t zeros = 0;
  uint64_t nan = 0;
  uint64_t infinite = 0;
  WideNumber min = 0, max = 0, mean = 0;  // if finite > 0
  WideNumber squares = 0;                 // summed squares of distances from the mean

  WideNumber Std() const;
  // As if the elements of `other` followed.
  void Append(const TensorStats& other);
};

// The statistics of a run of elements.  REQUIRES: HasNumbers(dtype).
TensorStats StatsOf(DType dtype, std::span<const std::byte> bytes);

// One per atom.  BLOCKS: until all are read.
Result<std::vector<TensorStats>> StatsOfAtoms(const StepModel& model, BlobReader& blobs,
                                              std::span<const AtomIndex> atoms,
                                              const JobOptions& options);

}  // namespace ckptfs
