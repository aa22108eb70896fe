// SPDX-License-Identifier: Apache-2.0

#include "core/blob/prefetch_requests.h"

#include <algorithm>

namespace ckptfs {
namespace {

// Neighbours closer than this are asked for in one request; of blocks that travel
// one by one nothing is fetched that nobody asked for.
constexpr uint64_t kCoalesceGap = 64 << 10;
constexpr size_t kMaxAsked = 1024;  // collected

}  // namespace

PrefetchRequests::~PrefetchRequests() {
  SendRange();
  SendBlocks();
}

void PrefetchRequests::Add(BlobIndex blob, uint64_t offset, uint64_t length) {
  if (!held_ || held_->blob() != blob) {
    SendRange();
    auto held = blobs_.Hold(blob);
    held_ = held ? *std::move(held) : nullptr;
    if (!held_) return;
    if (held_->mapped() == nullptr) far_.push_back(held_);
    begin_ = end_ = offset;
  }
  if (offset >= held_->size()) return;
  length = std::min(length, held_->size() - offset);
  if (held_->mapped() == nullptr) return AddBlocks(offset, length);
  if (offset < begin_ || offset > end_ + kCoalesceGap) {
    SendRange();
    begin_ = end_ = offset;
  }
  end_ = std::max(end_, offset + length);
}

void PrefetchRequests::AddBlocks(uint64_t offset, uint64_t length) {
  const uint64_t size = blobs_.cache().block();
  for (uint64_t k = offset / size; k * size < offset + length; ++k) {
    const BlockCache::BlockId id{&held_->source(), k};
    if (blocks_.empty() || blocks_.back() != id) blocks_.push_back(id);
  }
  if (blocks_.size() >= kMaxAsked) SendBlocks();
}

void PrefetchRequests::SendRange() {
  if (held_ && begin_ != end_) blobs_.Prefetch(*held_, begin_, end_ - begin_);
  begin_ = end_;
}

void PrefetchRequests::SendBlocks() {
  if (blocks_.empty()) return;
  SortBlocks(blocks_);
  blobs_.cache().Prefetch(blocks_);
  blocks_.clear();
}

}  // namespace ckptfs
