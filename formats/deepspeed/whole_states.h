// SPDX-License-Identifier: Apache-2.0
//
// PlaceWholeStates puts the states of one parameter, as a torch optimizer has them, into the step:
// those that fit the parameter (core/state/state_fit.h).  Every other one is left out alone, by
// its name and the reason; a state that is None is nothing that anybody misses.
//
// Thread safety: none; one thread builds one step.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/sharding/placer.h"

namespace ckptfs::deepspeed {

// Says which parameter the states are of, who holds them, and of which part of it.
struct StatesAt {
  ParameterIndex parameter{};
  const std::string& name;  // of the parameter
  const Shape& shape;       // of what the holder has of it
  Holder holder = {};
  bool part = false;  // tensor-parallel ranks have parts
};

// Errors are those of the placer.
Status PlaceWholeStates(const PartitionStates& states, const StatesAt& at, Placer& placer,
                        StepModel& header);

}  // namespace ckptfs::deepspeed
