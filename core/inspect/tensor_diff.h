// SPDX-License-Identifier: Apache-2.0
//
// DiffSteps compares two steps atom by atom, in blocks and on several threads: what one has and
// the other lacks, what has another shape or dtype, and what changed by how much.  Atoms are
// paired by the name of their parameter (or an alias), optimizer and kind.
//
//   bits      elements whose bits differ; of other dtypes whose values do
//   values    elements whose values differ: two NaN are equal, and two zeros
//   beyond    of them, those that a tolerance does not excuse:
//             |a - b| > absolute + relative * |b|, or one is not finite
//   max_abs, max_rel   of pairs that are finite; max_rel = |a - b| / |b| where b is not 0
//
// Thread safety: may be called concurrently.
// Lifetime: models and blobs must outlive the call.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/inspect/tensor_values.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct Tolerance {
  double absolute = 0;
  double relative = 0;
};

struct ValueDiff {
  uint64_t elements = 0;
  uint64_t bits = 0;
  uint64_t values = 0;
  uint64_t beyond = 0;
  std::optional<uint64_t> first;  // element whose bits (or values) differ
  WideNumber max_abs = 0;
  WideNumber max_rel = 0;
};

// `first_element` is the number of the first one.  REQUIRES: HasNumbers of both; as many
// elements in both.
ValueDiff DiffOf(DType a_dtype, std::span<const std::byte> a, DType b_dtype,
                 std::span<const std::byte> b, const Tolerance& tolerance, uint64_t first_element);

struct AtomDiff {
  enum class Kind : uint8_t { kSame, kChanged, kAdded, kRemoved, kReshaped, kRetyped };
  Kind kind = Kind::kSame;
  std::string name;  // as the first step spells it, or the second what the first lacks
  std::string optimizer;
  std::string atom_kind;
  std::optional<AtomIndex> a, b;
  ValueDiff values;  // kSame, kChanged, kRetyped; of packed and complex dtypes only `bits`
};
std::string_view AtomDiffName(AtomDiff::Kind kind);

struct StepRef {
  const StepModel* model = nullptr;
  BlobReader* blobs = nullptr;
};

// In the first step's order, what is added behind.  `wanted`: which are compared, by the
// parameter's name and kind; empty: all.
// BLOCKS: until both are read.
Result<std::vector<AtomDiff>> DiffSteps(
    const StepRef& a, const StepRef& b, const Tolerance& tolerance, const JobOptions& options,
    const std::function<bool(const std::string& name, const std::string& kind)>& wanted = {});

}  // namespace ckptfs
