// SPDX-License-Identifier: Apache-2.0
//
// UniversalIndex is what a step shows in a DeepSpeed universal directory of one
// layout: which zero/<name>/ directories there are, which states lie in each,
// and how an engine of another tensor-parallel degree cuts them.
//
// Thread safety: immutable once built.
// Lifetime: holds indexes into the step, no pointers.
// Units: elements.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"

namespace ckptfs::deepspeed {

// One file of zero/<name>/: "fp32", "exp_avg", ..., "step" (without ".pt").
// `atoms` has one atom, or one per expert-parallel rank (stacked along dim 0).
// Empty: a state the source never made for this parameter, though it made it
// for others of its group (a parameter without gradients): zeros, which is how an
// optimizer starts it.
struct UniversalState {
  std::string file;
  std::vector<AtomIndex> atoms;
};

// One zero/<name>/ directory.
struct UniversalParameter {
  std::string name;
  ParameterIndex parameter{};          // the first, if stacked
  std::vector<UniversalState> states;  // sorted by file
  uint64_t expert_ranks = 0;           // > 0: stacked over that many ep ranks
};

struct UniversalIndex {
  std::string tag;
  uint32_t model_files = 1;                    // mp_world_size
  std::vector<UniversalParameter> parameters;  // sorted by name
  std::map<std::string, std::string> links;    // alias directory -> parameter directory
  std::vector<std::string> left_out;           // lines, as View's

  const UniversalParameter* Find(std::string_view name) const;
  uint64_t MemoryBytes() const;
};

// kUnsupported or kInvalid: why this step cannot be shown so.
Result<UniversalIndex> BuildUniversalIndex(const ShownState& shown);

}  // namespace ckptfs::deepspeed
