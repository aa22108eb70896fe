// SPDX-License-Identifier: Apache-2.0

#include "core/view/far_copies.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace ckptfs {
namespace {

// Blocks held at a time: 32 MiB of them, since what a strided copy touches can be
// many times what it takes.
constexpr size_t kMaxBlocks = 512;
constexpr size_t kMaxWidth = 16;

}  // namespace

void FarCopies::Add(const std::shared_ptr<const BlobReader::Held>& held, const Copy& copy) {
  if (held_.empty() || held_.back() != held) held_.push_back(held);
  copies_.push_back(Placed{copy, held_.size() - 1});
}

void FarCopies::Clear() {
  copies_.clear();
  held_.clear();
}

FarCopies::Part FarCopies::PartAt(size_t index, uint64_t first) const {
  const Copy& copy = copies_[index].copy;
  const uint64_t width = copy.conversion->stored_width();
  const uint64_t block_size = blobs_.cache().block();
  const uint64_t at = copy.offset + first * copy.source_stride;
  const uint64_t end = (at / block_size + 1) * block_size;
  Part part{index, first, 1, at / block_size, at + width > end};
  if (part.split) return part;
  const uint64_t left = copy.count - first;
  part.count =
      copy.source_stride == 0 ? left : std::min(left, (end - width - at) / copy.source_stride + 1);
  return part;
}

Status FarCopies::Run() {
  std::vector<Part> parts;
  size_t blocks = 0;  // at most: neighbours of one copy are counted twice
  for (size_t i = 0; i < copies_.size(); ++i) {
    for (uint64_t first = 0; first < copies_[i].copy.count;) {
      parts.push_back(PartAt(i, first));
      first += parts.back().count;
      const bool another = parts.size() < 2 || parts[parts.size() - 2].block != parts.back().block;
      blocks += (another ? 1 : 0) + (parts.back().split ? 1 : 0);
      if (blocks < kMaxBlocks) continue;
      CKPT_RETURN_IF_ERROR(RunParts(parts));
      parts.clear();
      blocks = 0;
    }
  }
  return RunParts(parts);
}

Status FarCopies::RunParts(std::span<const Part> parts) {
  const auto id_of = [this](const Part& part, uint64_t further) {
    return BlockCache::BlockId{&held_[copies_[part.copy].held]->source(), part.block + further};
  };
  std::vector<BlockCache::BlockId> ids;
  for (const Part& part : parts) {
    ids.push_back(id_of(part, 0));
    if (part.split) ids.push_back(id_of(part, 1));
  }
  SortBlocks(ids);
  if (ids.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(const std::vector<BlockCache::Block> blocks, blobs_.cache().Get(ids));
  for (const Part& part : parts) {
    const size_t i = FindBlock(ids, id_of(part, 0));
    CopyPart(part, blocks[i]->span().data(), part.split ? blocks[i + 1]->span().data() : nullptr);
  }
  return {};
}

void FarCopies::CopyPart(const Part& part, const std::byte* block, const std::byte* next) const {
  const Copy& copy = copies_[part.copy].copy;
  const uint64_t width = copy.conversion->stored_width();
  const uint64_t block_size = blobs_.cache().block();
  const uint64_t within = copy.offset + part.first * copy.source_stride - part.block * block_size;
  std::byte* const to =
      copy.destination + part.first * copy.destination_stride * copy.conversion->shown_width();
  if (!part.split) {
    return copy.conversion->Run(block + within, copy.source_stride / width, to,
                                copy.destination_stride, part.count);
  }
  std::array<std::byte, kMaxWidth> element;
  const size_t here = block_size - within;
  std::memcpy(element.data(), block + within, here);
  std::memcpy(element.data() + here, next, width - here);
  copy.conversion->Run(element.data(), 1, to, copy.destination_stride, 1);
}

}  // namespace ckptfs
