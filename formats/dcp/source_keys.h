// SPDX-License-Identifier: Apache-2.0
//
// The document of a DCP source with all that no other view knows; states that are neither tensors
// nor numbers are kSourceStates (formats/torch/source_states.h).
//
//   kSourceRest   under the keys that they had: parts of an optimizer that are not understood,
//                 values beside the weights in the model
//
// Thread safety: a constant.

#pragma once

#include <string_view>

namespace ckptfs::dcp {

inline constexpr std::string_view kSourceRest = "dcp/rest";

}  // namespace ckptfs::dcp
