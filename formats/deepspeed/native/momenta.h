// SPDX-License-Identifier: Apache-2.0
//
// Momenta are those of DeepSpeed's Muon at ZeRO 1 and 2 (zero/stage_1_and_2.py
// get_flat_partition of 0.19.7).  Muon needs whole matrices, so a rank keeps one flat buffer of the
// whole parameters of which its partition has a part, in the group's order:
//
//   partitions   | a a a a a b b | b c c c - - |
//   momenta      | a a a a a b b b |   | b b b c c c |
//
// A parameter that lies on several ranks (b) has a momentum on each of them.  Each rank goes on
// with its own, and the copies of 0.19.7 differ: such a parameter's momentum is left out, and so is
// that of a group whose buffers do not have this length.
//
// Thread safety: none; one thread builds one step.
// Lifetime: refers to Named and to the tensors of Parsed.
// Units: elements.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/native/named.h"
#include "formats/torch/file_tensor.h"

namespace ckptfs::deepspeed::native {

// A rank's buffer; null if its file has none.
struct MomentumBuffer {
  const std::string* file = nullptr;
  const FileTensor* tensor = nullptr;
};

// A group as its ranks share it.
struct SharedGroup {
  std::span<const ParameterIndex> parameters;  // in flattening order
  std::span<const Holder> holders;             // of each
  std::span<const uint64_t> members;           // elements of each
  std::span<const uint64_t> starts;            // of each, in the group
  uint64_t partition = 0;                      // elements of each rank's
};

class Momenta {
 public:
  // Adds a group of Muon's.  REQUIRES: the partitions hold the parameters.
  void Add(const SharedGroup& group, std::span<const MomentumBuffer> ranks);

  // Adds the momentum of each parameter that has one and the same on every holder's part, and
  // says which are left out.
  void AddTo(const Named& named, StateDict& dict, StepModel& header) const;

 private:
  struct Part {
    Holder holder;
    const FileTensor* tensor = nullptr;
    uint64_t at = 0;  // in the buffer
    uint64_t elements = 0;
  };
  struct Found {
    std::vector<Part> parts;
    std::string why;     // it is left out
    size_t holders = 0;  // groups that have the parameter
  };

  std::map<ParameterIndex, Found> found_;
};

}  // namespace ckptfs::deepspeed::native
