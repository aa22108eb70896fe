// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/source_samples.h"

#include <algorithm>
#include <cstring>

namespace ckptfs {
namespace {

constexpr uint64_t kWidth = sizeof(uint64_t);
constexpr uint64_t kPerTensor = 16;

}  // namespace

SourceSamples::SourceSamples(const CaptureFile& file) {
  for (const CopyRun& run : file.Runs(0, file.bytes(), true)) {
    if (run.device != kHost || run.bytes < kWidth) continue;
    const uint64_t count = std::min(kPerTensor, run.bytes / kWidth);
    for (uint64_t i = 0; i < count; ++i) {
      // Takes the first, the last, and between them evenly.
      const uint64_t at = count == 1 ? 0 : (run.bytes - kWidth) / (count - 1) * i;
      const uint64_t from = i + 1 == count ? run.bytes - kWidth : at;
      Sample sample{run.at + from, 0};
      std::memcpy(&sample.value, run.from + from, kWidth);
      samples_.push_back(sample);
    }
  }
}

std::optional<uint64_t> SourceSamples::FindChange(uint64_t begin,
                                                  std::span<const std::byte> copied) const {
  auto at = std::ranges::lower_bound(samples_, begin, {}, &Sample::at);
  for (; at != samples_.end() && at->at < begin + copied.size(); ++at) {
    const uint64_t here = at->at - begin;
    // The rest of one at the end lies in the next chunk.
    const uint64_t width = std::min(kWidth, copied.size() - here);
    if (std::memcmp(copied.data() + here, &at->value, width) != 0) return at->at;
  }
  return std::nullopt;
}

}  // namespace ckptfs
