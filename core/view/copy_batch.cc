// SPDX-License-Identifier: Apache-2.0

#include "core/view/copy_batch.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/prefetch_requests.h"
#include "core/io/bus_guard.h"
#include "core/view/source_runs.h"

namespace ckptfs {
namespace {

// One page in this many bytes is looked at to see whether the data is cached.
constexpr uint64_t kSampleBytes = 128 << 10;
constexpr size_t kMaxSamples = 8;

}  // namespace

// Makes the blob the last one held.
Status CopyBatch::Hold(BlobIndex blob) {
  if (held_count_ > 0 && held_[held_count_ - 1]->blob() == blob) return {};
  if (held_count_ == kMaxHeld) CKPT_RETURN_IF_ERROR(Flush());
  CKPT_ASSIGN_OR_RETURN(held_[held_count_], blobs_.Hold(blob));
  ++held_count_;
  return {};
}

Status CopyBatch::Add(BlobIndex blob, uint64_t offset, uint64_t source_stride,
                      std::byte* destination, uint64_t destination_stride, uint64_t count,
                      const Conversion& conversion) {
  if (count == 0) return {};
  if (copy_count_ == kMaxCopies || far_.full()) CKPT_RETURN_IF_ERROR(Flush());
  CKPT_RETURN_IF_ERROR(Hold(blob));
  const BlobReader::Held& held = *held_[held_count_ - 1];
  const auto extent = ExtentOf(count, source_stride, conversion.stored_width());
  if (!extent || !RangeInside(offset, *extent, held.size())) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(blobs_.PathOf(blob), " has ", held.size(), " bytes; ", count,
                       " elements from byte ", offset, " on are not there"));
  }
  bytes_ += count * conversion.stored_width();
  if (held.mapped() == nullptr) {
    far_.Add(held_[held_count_ - 1], {offset, source_stride * conversion.stored_width(),
                                      destination, destination_stride, count, &conversion});
    return {};
  }
  copies_[copy_count_++] = Copy{held.mapped() + offset,
                                destination,
                                source_stride,
                                destination_stride,
                                count,
                                *extent,
                                &conversion,
                                static_cast<uint32_t>(held_count_ - 1)};
  return {};
}

void CopyBatch::RunCopies() {
  for (size_t i = 0; i < copy_count_; ++i) {
    const Copy& copy = copies_[i];
    copy.conversion->Run(copy.source, copy.source_stride, copy.destination, copy.destination_stride,
                         copy.count);
  }
}

bool CopyBatch::LooksCold() const {
  const size_t samples = std::clamp<uint64_t>(bytes_ / kSampleBytes, 1, kMaxSamples);
  for (size_t i = 0; i < samples; ++i) {
    // Evenly over the copies; over the bytes of a copy that is sampled often.
    const size_t index = i * copy_count_ / samples;
    const Copy& copy = copies_[index];
    const uint64_t within = copy_count_ < samples ? copy.extent / samples * i : 0;
    const BlobReader::Held& held = *held_[copy.held];
    const uint64_t offset = static_cast<uint64_t>(copy.source - held.mapped());
    if (!blobs_.Resident(held, offset + within)) return true;
  }
  return false;
}

void CopyBatch::PrefetchAll() const {
  PrefetchRequests requests(blobs_);
  for (size_t i = 0; i < copy_count_; ++i) {
    const Copy& copy = copies_[i];
    const BlobReader::Held& held = *held_[copy.held];
    requests.Add(held.blob(), static_cast<uint64_t>(copy.source - held.mapped()), copy.extent);
  }
}

Error CopyBatch::FaultAt(const std::byte* address) const {
  for (size_t i = 0; i < held_count_; ++i) {
    const std::byte* const mapped = held_[i]->mapped();
    if (mapped == nullptr) continue;
    if (address >= mapped && address < mapped + AlignUp(held_[i]->size(), 4096)) {
      return blobs_.Vanished(held_[i]->blob());
    }
  }
  return Error{ErrorCode::kExhausted, "the memory to be filled has no backing (out of space?)"};
}

Status CopyBatch::Flush() {
  Status done;
  if (copy_count_ > 0) {
    if (LooksCold()) PrefetchAll();
    const std::byte* address = nullptr;
    const auto run = [](void* batch) { static_cast<CopyBatch*>(batch)->RunCopies(); };
    if (!RunGuarded(run, this, &address)) done = Fail(FaultAt(address));
  }
  if (done && !far_.empty()) done = far_.Run();
  if (bytes_ > 0) blobs_.CountRead(bytes_);
  far_.Clear();
  for (size_t i = 0; i < held_count_; ++i) held_[i].reset();
  copy_count_ = held_count_ = 0;
  bytes_ = 0;
  return done;
}

}  // namespace ckptfs
