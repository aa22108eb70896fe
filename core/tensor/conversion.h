// SPDX-License-Identifier: Apache-2.0
//
// Conversion turns stored elements into shown ones: a chain of casts (stored
// dtype, the dtypes of derived atoms on the way, shown dtype), optionally
// multiplied by a factor first.  Equal dtypes copy any bytes, also integers,
// bool and fp8; casts exist between the floating types only.
//
// Thread safety: immutable value; Run may be called concurrently.  Run
// allocates nothing and owns nothing, so a bus error may leave it at any
// instruction.
// Units: elements; strides are elements of the respective dtype.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/result.h"
#include "core/tensor/cast.h"

namespace ckptfs {

class Conversion {
 public:
  // Longest chain: stored, the atom, two derivations, shown.
  static constexpr size_t kMaxChain = 5;

  // `chain` is stored, ..., shown.  With a factor other than 1 the stored value
  // is multiplied in fp32 (fp64 if stored so); a factor that is the reciprocal
  // of an integer divides instead, which is what the frameworks do.
  // kUnsupported names the two dtypes that have no cast.
  static Result<Conversion> Make(std::span<const DType> chain, double factor = 1.0);

  // REQUIRES: source and destination do not overlap.
  void Run(const std::byte* source, uint64_t source_stride, std::byte* destination,
           uint64_t destination_stride, uint64_t elements) const;

  uint32_t stored_width() const { return stored_width_; }  // bytes
  uint32_t shown_width() const { return shown_width_; }
  bool is_copy() const { return count_ == 0; }

 private:
  struct Step {
    CastFunction cast = nullptr;  // nullptr: multiply in place
    uint32_t width = 0;           // bytes of its result
  };
  void Scale(std::byte* values, size_t elements, uint32_t width) const;
  void RunBlock(const std::byte* source, std::byte* destination, size_t elements) const;

  std::array<Step, 2 * kMaxChain> steps_{};
  uint32_t count_ = 0;
  uint32_t stored_width_ = 0;
  uint32_t shown_width_ = 0;
  double factor_ = 1.0;
  bool divide_ = false;
};

}  // namespace ckptfs
