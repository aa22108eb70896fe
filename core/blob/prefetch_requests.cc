// SPDX-License-Identifier: Apache-2.0

#include "core/blob/prefetch_requests.h"

#include <algorithm>

namespace ckptfs {
namespace {

// Neighbours closer than this are asked for in one request.
constexpr uint64_t kCoalesceGap = 64 << 10;

}  // namespace

void PrefetchRequests::Add(BlobIndex blob, uint64_t offset, uint64_t length) {
  if (blob_ != blob || offset < begin_ || offset > end_ + kCoalesceGap) {
    Send();
    blob_ = blob;
    begin_ = end_ = offset;
  }
  uint64_t end;
  if (!__builtin_add_overflow(offset, length, &end)) end_ = std::max(end_, end);
}

void PrefetchRequests::Send() {
  if (begin_ == end_) return;
  if (const auto mapping = blobs_.Map(blob_)) blobs_.Prefetch(**mapping, begin_, end_ - begin_);
  begin_ = end_;
}

}  // namespace ckptfs
