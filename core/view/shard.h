// SPDX-License-Identifier: Apache-2.0
//
// Shard says what a rank of a target layout holds: pattern x layout -> the
// local tensor of a parameter, or nothing if the rank has no part of it
// (another pipeline stage or expert rank).
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

class Family;

// kInvalid for degrees beyond what the step's numbers make sense of: tp or etp
// above the largest dimension, more pipeline stages than layers and two for
// what stands before and behind them, more ranks than 65,536 and 16 times the
// source's.  CheckLayout begins with it.
Status CheckDegrees(const StepModel& step, const Layout& layout);

// Refusals of single parameters as one: a reason once, with the first parameter that has it and
// how many have it besides.
class ParameterRefusals {
 public:
  // REQUIRES: the step outlives the refusals.
  explicit ParameterRefusals(const StepModel& step) : step_(step) {}

  void Add(const Parameter& parameter, Error reason);
  // The error for a parameter that cannot be cut so: if its family rule lacks sizes, these are
  // the reason, which all parameters, degrees and formats have in common.
  void AddCut(const Parameter& parameter, Error reason);
  // kInvalid: "'a' and 3 more: reason; 'b': another".  Success if nothing was added.
  Status Finish() const;

 private:
  struct Reason {
    Error error;
    uint64_t parameters = 0;
  };
  const StepModel& step_;
  std::shared_ptr<const Family> family_;  // the step's, once it was needed
  std::string below_;                     // the module that its model lies in
  std::vector<Reason> reasons_;           // in the order of their first parameters
};

// kInvalid with the parameter and the rule when a degree does not fit: part
// sizes that do not divide, layers that do not split (naming the split token),
// a pattern nobody declared, experts that do not divide by ep.
// `trainable_only`: for views whose reader never takes buffers and frozen
// parameters apart.
Status CheckLayout(const StepModel& step, const Layout& layout, bool trainable_only = false);

// The pipeline stage of a parameter; nothing: several (see Holds).
Result<std::optional<uint32_t>> StageOf(const StepModel& step, const Layout& layout,
                                        const Parameter& parameter);

// Stages of the parameter in rising order.
Result<std::vector<uint32_t>> StagesOf(const StepModel& step, const Layout& layout,
                                       const Parameter& parameter);

// True if the rank's stage and expert rank hold the parameter; no rank holds what is beside the
// model.
Result<bool> Holds(const StepModel& step, const Layout& layout, const RankCoordinate& rank,
                   const Parameter& parameter);

// The rank's local tensor of the parameter's weight (tp/ep applied).
// REQUIRES: Holds(...).
Result<std::shared_ptr<const LocalTensor>> LocalOf(const StepModel& step, const Layout& layout,
                                                   const RankCoordinate& rank,
                                                   const Parameter& parameter);

// [begin, end) elements of a local tensor of `elements` that dp rank `dp` of
// `degree` holds when the optimizer is sharded: the dp-th slice of
// ceil(elements / degree); end may pass `elements` (padding).
std::pair<uint64_t, uint64_t> ZeroRange(uint64_t elements, uint64_t dp, uint64_t degree);

// Into how many slices ZeRO cuts the parameter's states, and which of them the rank has.  Experts
// are sliced over the ranks that hold the same ones.
struct ZeroSlice {
  uint64_t number = 0;
  uint64_t degree = 1;
};
ZeroSlice ZeroSliceOf(const Layout& layout, const RankCoordinate& rank, const Parameter& parameter);

}  // namespace ckptfs
