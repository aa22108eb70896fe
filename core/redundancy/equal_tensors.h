// SPDX-License-Identifier: Apache-2.0
//
// FindEqualTensors finds tensors with equal bytes, whatever they are called: candidates have one
// dtype and size, then equal digests of samples, then equal digests of all bytes.  A tensor
// that is alone in its stage is not read further.
//
// Thread safety: pure apart from the blob reader.
// Memory: a digest for each tensor and kDigestBlock, and kDigestBlock of data for each thread.

#pragma once

#include <cstdint>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/redundancy/redundancy.h"
#include "core/redundancy/tensor_copies.h"

namespace ckptfs {

inline constexpr uint64_t kDigestBlock = uint64_t{4} << 20;

struct EqualSearch {
  std::vector<EqualBytes> groups;  // the largest first, then in the step's order
  uint64_t bytes_read = 0;
};

// Tensors that are averages are left out.  BLOCKS: on reading.
Result<EqualSearch> FindEqualTensors(const TensorCopies& copies, BlobReader& blobs,
                                     const RedundancyOptions& options);

}  // namespace ckptfs
