// SPDX-License-Identifier: Apache-2.0
//
// A stripe is a file cut into units, each of which another node keeps.  Chunk c of the file
// (kChunkBytes, the last one shorter) is chunk c / data of unit c % data; `data` chunks that
// follow each other are a row.  Chunk r of a parity unit is calculated from row r, as long as
// the row's first chunk; chunks that a row lacks count as zeros.  Any `data` units are the file.
// With one data unit each unit is the whole file: a copy is that case.
//
// StripeCode calculates parity, and units from others: Reed-Solomon over GF(2^8), polynomial
// 0x11d, by ISA-L.  Its matrix is Cauchy's, scaled so that the first parity row and the first
// column are ones: one parity unit is the XOR of all, and parity of one data unit its copy.
//
// Thread safety: immutable after construction.
// Units: bytes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

inline constexpr uint32_t kMostUnits = 255;  // data and parity units of one stripe

// How a file is cut.
struct StripeShape {
  uint32_t data = 1, parity = 0;
  bool operator==(const StripeShape&) const = default;

  uint32_t units() const { return data + parity; }
  // False: each unit is the whole file.
  bool cuts() const { return data > 1; }
  // A unit's number among all that may be held of a file: 0 is the whole of it.
  uint32_t SlotOf(uint32_t unit) const { return cuts() ? unit + 1 : 0; }
  uint64_t RowsOf(uint64_t file_bytes) const;
  // How long a chunk of a unit is; 0 if the unit does not have it.
  uint64_t ChunkBytesOf(uint32_t unit, uint64_t row, uint64_t file_bytes) const;
  // 0 for data units of a file that is too small to have them: nobody keeps these.
  uint64_t UnitBytes(uint32_t unit, uint64_t file_bytes) const;
};

class StripeCode {
 public:
  // REQUIRES: data is not 0, and the units are at most kMostUnits.
  explicit StripeCode(StripeShape shape);

  const StripeShape& shape() const { return shape_; }
  // Adds a data unit's bytes to a parity unit's, which were zeros before the first one.  Data
  // units come in any order, each of them once.
  // REQUIRES: unit < data, j < parity; `bytes` are not more than `parity`.
  void Fold(uint32_t unit, std::span<const std::byte> bytes, uint32_t j,
            std::span<std::byte> parity) const;
  // Calculates a unit from `data` others, of which shorter ones count as if zeros followed.
  // kInvalid if these are fewer.  REQUIRES: none of `known` is longer than `out`.
  Status Restore(const std::map<uint32_t, std::span<const std::byte>>& known, uint32_t unit,
                 std::span<std::byte> out) const;

 private:
  using Row = std::vector<unsigned char>;  // a unit's coefficients, one for each data unit
  Row RowOf(uint32_t unit) const;

  const StripeShape shape_;
  std::vector<Row> parity_;
};

}  // namespace ckptfs
