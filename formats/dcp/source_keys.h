// SPDX-License-Identifier: Apache-2.0
//
// Where a DCP source's state dict had what: documents of their own, so that a view can give
// the keys back as they were; and kSourceStates (formats/torch/source_states.h).
//
//   kSourceKeys   { "model": prefix of the weights, "" or with '.' at its end,
//                   "optimizers": [ prefix.. ], "" for an optimizer's own state dict,
//                   "flat": whether hyper-parameters are by parameter,
//                   "numbers": { label of an optimizer that numbers them: { parameter: number } },
//                   "kinds": { state in a dict or a list, joined by dots: [ key | index .. ] },
//                   "tensors": { key of a hyper-parameter that was a tensor of one element:
//                                (dtype, torch.Size) },
//                   "state_names": { name of a weight: what its states' keys call it },
//                                where they differ }
//   kSourceRest   all else that no other view knows, under the keys that it had: parts of an
//                 optimizer that are not understood, values beside the weights in the model
//
// Thread safety: constants.

#pragma once

#include <string_view>

namespace ckptfs::dcp {

inline constexpr std::string_view kSourceKeys = "dcp/keys";
inline constexpr std::string_view kSourceRest = "dcp/rest";

}  // namespace ckptfs::dcp
