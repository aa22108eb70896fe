// SPDX-License-Identifier: Apache-2.0
//
// A parameter is what the engine calls it: the name in param_shapes, that of a
// universal directory's folder, which the engine asks for again when it loads.
// Wrappers (torch.compile's "_orig_mod.", PEFT's "base_model.model.") are part
// of it.  state_dict() spells it the same, with one exception: torch's
// CheckpointWrapper takes its "_checkpoint_wrapped_module." out there.
//
// Thread safety: const methods may be called concurrently.

#pragma once

#include <map>
#include <string>
#include <string_view>

namespace ckptfs::deepspeed {

class StateDictNames {
 public:
  // A name as the engine spells it.
  void Add(std::string_view name);
  // The engine's spelling of a name in a state_dict.
  std::string Of(std::string_view name) const;

 private:
  std::map<std::string, std::string, std::less<>> wrapped_;  // by the state_dict's spelling
};

// The state_dict's spelling of an engine's name.
std::string InStateDict(std::string_view name);

}  // namespace ckptfs::deepspeed
