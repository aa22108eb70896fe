// SPDX-License-Identifier: Apache-2.0

#include "core/view/lent_bytes.h"

#include <algorithm>
#include <utility>

#include "core/base/checked_math.h"

namespace ckptfs {
namespace {

// Shorter stretches take the kernel longer than a copy takes us.
constexpr uint64_t kLeastMean = 16 << 10;

// One page in this many bytes is looked at to see whether the data is cached.
constexpr uint64_t kSampleBytes = 128 << 10;
constexpr uint64_t kMaxSamples = 8;

}  // namespace

bool Lender::Add(BlobIndex blob, uint64_t offset, uint64_t length) {
  if (length == 0) return true;
  if (stretches_.size() == kMaxStretches) return false;
  std::shared_ptr<const BlobReader::Held> held;
  for (const Stretch& known : stretches_) {
    if (known.held && known.held->blob() == blob) held = known.held;
  }
  if (!held) {
    auto opened = blobs_.Hold(blob);
    if (!opened) return false;  // the reader says why
    held = *std::move(opened);
  }
  if (held->mapped() == nullptr || !RangeInside(offset, length, held->size())) return false;
  const std::span<const std::byte> bytes(held->mapped() + offset, length);
  bytes_ += length;
  if (!stretches_.empty() && stretches_.back().held == held &&
      stretches_.back().bytes.data() + stretches_.back().bytes.size() == bytes.data()) {
    stretches_.back().bytes = {stretches_.back().bytes.data(),
                               stretches_.back().bytes.size() + length};
    return true;
  }
  stretches_.push_back({std::move(held), bytes});
  return true;
}

bool Lender::Add(std::span<const std::byte> literal) {
  if (literal.empty()) return true;
  if (stretches_.size() == kMaxStretches) return false;
  stretches_.push_back({nullptr, literal});
  bytes_ += literal.size();
  return true;
}

bool Lender::IsWorthIt() const {
  if (bytes_ < stretches_.size() * kLeastMean) return false;
  const uint64_t samples = std::clamp<uint64_t>(bytes_ / kSampleBytes, 1, kMaxSamples);
  const uint64_t step = CeilDiv(bytes_, samples);
  uint64_t next = 0;   // of the whole, where the next sample is taken
  uint64_t begin = 0;  // of the whole, where the stretch starts
  for (const Stretch& stretch : stretches_) {
    const uint64_t end = begin + stretch.bytes.size();
    for (; next < end; next += step) {
      if (!stretch.held) continue;
      const uint64_t first = static_cast<uint64_t>(stretch.bytes.data() - stretch.held->mapped());
      if (!blobs_.Resident(*stretch.held, first + (next - begin))) return false;
    }
    begin = end;
  }
  return true;
}

LentBytes Lender::Take() && {
  LentBytes out;
  for (Stretch& stretch : stretches_) {
    out.spans.push_back(stretch.bytes);
    if (stretch.held) out.held.push_back(std::move(stretch.held));
  }
  blobs_.CountRead(bytes_);
  return out;
}

}  // namespace ckptfs
