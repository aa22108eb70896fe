// SPDX-License-Identifier: Apache-2.0
//
// FindUnchanged says what each step of a run stores again though it is the same as in the step
// before: frozen layers, the base of an adapter, experts that no token reached.  Tensors are
// paired by the name of their parameter (or an alias), optimizer and kind, and compared in
// units of kCompareUnit bytes at the coordinates of the whole tensor, however each step cut it.
//
//   unchanged  all units are equal
//   partly     some are
//   changed    none is
//   fresh      the step before lacks it, or has another shape, dtype or number of averaged copies
//
// A tensor's equal copies are compared and counted once, an average's copies all.
//
// Thread safety: may run beside readers of the same steps.
// Lifetime: the steps and their blobs must outlive the call.
// Units: bytes.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/inspect/tensor_diff.h"
#include "core/redundancy/redundancy.h"

namespace ckptfs {

enum class SinceBefore : uint8_t { kUnchanged, kPartly, kChanged, kFresh };
inline constexpr size_t kSinceBefores = 4;
std::string_view SinceBeforeName(SinceBefore since);

struct TensorSince {
  AtomIndex atom{};  // of the later step
  SinceBefore since = SinceBefore::kFresh;
  uint64_t bytes = 0;
  uint64_t unchanged = 0;  // of them
  uint64_t shared = 0;     // of `unchanged`: both steps refer to the same bytes of the store
};

struct ClassSince {
  std::string name;
  std::array<uint64_t, kSinceBefores> tensors{};
  uint64_t bytes = 0, unchanged = 0, shared = 0;
};

// One step against the one before it.
struct StepSince {
  std::vector<ClassSince> classes;   // in the order of the later step's atoms
  std::vector<TensorSince> tensors;  // that its files hold, in that order
  uint64_t bytes_read = 0;           // of both steps
};

// As many as there are steps but the first.  The stages of `options.progress` are named by the
// later step's id.  Errors as of FindRedundancy.
// BLOCKS: on reading; a step that stands between two others is read twice.
Result<std::vector<StepSince>> FindUnchanged(std::span<const StepRef> steps,
                                             const RedundancyOptions& options);

}  // namespace ckptfs
