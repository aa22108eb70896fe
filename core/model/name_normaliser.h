// SPDX-License-Identifier: Apache-2.0
//
// NormaliseName strips what wrappers put into parameter names: DDP's and
// DeepSpeed's leading "module.", torch.compile's "_orig_mod.", FSDP's
// "_fsdp_wrapped_module.", activation checkpointing's
// "_checkpoint_wrapped_module." wherever they stand, PEFT's leading
// "base_model.model." and, inside, "base_layer.", "original_module." and
// "modules_to_save.default.".  It is how rules look at a name; two parameters
// may have one such spelling, so it names none of them.
//
// Thread safety: pure function.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

// Never empty for a name that is not: a name made of wrappers only stays.
std::string NormaliseName(std::string_view name);

}  // namespace ckptfs
