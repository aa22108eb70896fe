// SPDX-License-Identifier: Apache-2.0
//
// SourceSamples are a few bytes of every lazy tensor in host memory as they were at the
// save.  A later copy that differs from them shows writes that torch does not count
// (through an alias of p.data, numpy, a fused kernel).  Devices' memory is not looked at.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: values.
// Units: bytes of the rank's file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "snapshot/trainer/capture.h"

namespace ckptfs {

class SourceSamples {
 public:
  SourceSamples() = default;
  // REQUIRES: the capture's memory is as it was saved.
  explicit SourceSamples(const CaptureFile& file);

  // Returns the first sampled byte in [begin, begin + copied.size()) that was copied otherwise.
  std::optional<uint64_t> FindChange(uint64_t begin, std::span<const std::byte> copied) const;

 private:
  struct Sample {
    uint64_t at = 0;
    uint64_t value = 0;
  };
  std::vector<Sample> samples_;  // by `at`
};

}  // namespace ckptfs
