// SPDX-License-Identifier: Apache-2.0
//
// BesideTensors makes atoms of a checkpoint's tensors that are not its model's: an averaged copy
// of the weights, a teacher, a critic.  Each is a parameter of Role::kBeside under the key that
// the tensor had, so that a view cuts it for its mesh as it cuts a weight, and its bytes may
// lie in any number of pieces.  A document says where in the state dict it stood.
//
// Thread safety: none; one per step.
// Lifetime: state, assembler and parameters must outlive it.

#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "formats/dcp/stored_state.h"

namespace ckptfs::dcp {

using ParametersByName = std::map<std::string, ParameterIndex, std::less<>>;

class BesideTensors {
 public:
  // `parameters`: the model's, by name, all of which are declared before the first tensor is added.
  BesideTensors(const StoredState& state, Assembler& assembler, const ParametersByName& parameters)
      : state_(state), assembler_(assembler), parameters_(parameters) {}

  // True if the tensor is better an atom than a part of a document: it is large, in several
  // pieces, not contiguous or empty.  If each rank saved its own, it is not one tensor.
  bool Wants(size_t tensor) const;

  // False where its chunks do not have as many elements as it: a part of it was not saved.
  bool IsComplete(size_t tensor) const;

  Result<AtomIndex> Add(size_t tensor);

 private:
  Pattern PatternOf(const TensorEntry& tensor) const;

  const StoredState& state_;
  Assembler& assembler_;
  const ParametersByName& parameters_;
};

}  // namespace ckptfs::dcp
