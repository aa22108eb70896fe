// SPDX-License-Identifier: Apache-2.0
//
// Numbered states of DCP: a script that saves optimizer.state_dict() instead of
// get_optimizer_state_dict() has keys "<optim>.state.<number>.<kind>".  OwnersOfNumbers says
// which weight has which number (core/state/ownership.h), or why nobody knows.
//
// Thread safety: pure but for `numbers_of`.
// Lifetime: metadata and keys must outlive the call.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/dcp/metadata.h"
#include "formats/dcp/state_keys.h"

namespace ckptfs::dcp {

// True if a key looks like a state of a number: a cheap no.
bool MayBeNumbered(const DcpMetadata& metadata);

struct NumberedOwners {
  std::vector<std::string>
      order;        // the weights' names by number; empty: none is numbered or proved
  std::string why;  // none is proved: the reason
  std::string remedy;
};

// The numbers in `params` of a group; empty if they are names.  BLOCKS: on reading the object.
using NumbersOf = std::function<Result<std::vector<uint64_t>>(KeyedEntry)>;

// `keys`: of the weights, and the optimizers' prefixes.  `given`: --parameter-order.
Result<NumberedOwners> OwnersOfNumbers(const DcpMetadata& metadata, const StateKeys& keys,
                                       std::span<const std::string> given,
                                       const NumbersOf& numbers_of);

}  // namespace ckptfs::dcp
