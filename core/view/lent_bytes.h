// SPDX-License-Identifier: Apache-2.0
//
// Lent bytes are a range of a virtual file that lies in memory as it is shown: in
// mapped blobs, whose elements follow one another there and are not cast, and in literals.
// A caller that hands them on (to the kernel) saves the copy into a buffer of ours.
//
// They are touched like any mapping of a file that others may truncate: by the kernel, which
// answers EFAULT, or under RunGuarded.
//
// Thread safety: none; one Lender per read.
// Lifetime: what is lent is valid while LentBytes lives, literals while their plan does.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/blob/blob_reader.h"

namespace ckptfs {

struct LentBytes {
  std::vector<std::span<const std::byte>> spans;  // in the order of the file
  std::vector<std::shared_ptr<const BlobReader::Held>> held;
  std::shared_ptr<const void> owner = nullptr;  // of the literals
};

class Lender {
 public:
  // More take the kernel longer than a copy takes us.
  static constexpr size_t kMaxStretches = 64;

  explicit Lender(BlobReader& blobs) : blobs_(blobs) {}

  // The bytes that follow in the file.  False if they cannot be lent, or are not worth it:
  // a blob that is not mapped, too many stretches.
  bool Add(BlobIndex blob, uint64_t offset, uint64_t length);
  bool Add(std::span<const std::byte> literal);

  // False where stretches are short, or some of it is known not to be in the page cache: reading
  // asks the device for all of it at once.
  bool IsWorthIt() const;
  LentBytes Take() &&;

 private:
  struct Stretch {
    std::shared_ptr<const BlobReader::Held> held;  // null: a literal
    std::span<const std::byte> bytes;
  };

  BlobReader& blobs_;
  std::vector<Stretch> stretches_;
  uint64_t bytes_ = 0;
};

}  // namespace ckptfs
