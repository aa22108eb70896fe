// SPDX-License-Identifier: Apache-2.0
//
// FarCopies does copies out of blobs that cannot be mapped: it finds which blocks
// the elements lie in, asks the cache for all of them at once, in the files'
// order, and copies block by block.
//
// Thread safety: none; one per read.
// Lifetime: reader, conversions and destinations must outlive Run.
// Units: offsets and strides of the source are bytes, of the destination elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/tensor/conversion.h"

namespace ckptfs {

class FarCopies {
 public:
  struct Copy {
    uint64_t offset;         // of the first element in the blob
    uint64_t source_stride;  // bytes
    std::byte* destination;
    uint64_t destination_stride;  // elements
    uint64_t count;
    const Conversion* conversion;
  };

  explicit FarCopies(BlobReader& blobs) : blobs_(blobs) {}

  // REQUIRES: the elements are in the blob; it is not mapped.
  void Add(const std::shared_ptr<const BlobReader::Held>& held, const Copy& copy);
  bool empty() const { return copies_.empty(); }
  // Time to Run: what was added takes some memory.
  bool full() const { return copies_.size() >= kMaxCopies; }
  void Clear();

  // Do all copies.  BLOCKS: on the storage.
  Status Run();

 private:
  static constexpr size_t kMaxCopies = 4096;

  struct Placed {
    Copy copy;
    size_t held;  // into held_
  };
  // Elements [first, first + count) of a copy, which all begin in one block and,
  // but for a single element (`split`), end in it.
  struct Part {
    size_t copy;
    uint64_t first;
    uint64_t count;
    uint64_t block;
    bool split;
  };

  Part PartAt(size_t copy, uint64_t first) const;
  Status RunParts(std::span<const Part> parts);
  void CopyPart(const Part& part, const std::byte* block, const std::byte* next) const;

  BlobReader& blobs_;
  std::vector<std::shared_ptr<const BlobReader::Held>> held_;
  std::vector<Placed> copies_;
};

}  // namespace ckptfs
