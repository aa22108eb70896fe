// SPDX-License-Identifier: Apache-2.0
//
// Where a DCP source's state dict had what: a document of its own, so that a view can give
// the keys back as they were.
//
//   kSourceKeys   { "model": prefix of the weights, "" or with '.' at its end,
//                   "optimizers": [ prefix.. ], "" for an optimizer's own state dict,
//                   "flat": whether hyper-parameters are by parameter,
//                   "tensors": { key of a hyper-parameter that was a tensor of one element:
//                                (dtype, torch.Size) },
//                   "state_names": { name of a weight: what its states' keys call it },
//                                where they differ }
//
// Thread safety: constants.

#pragma once

#include <string_view>

namespace ckptfs::dcp {

inline constexpr std::string_view kSourceKeys = "dcp/keys";

}  // namespace ckptfs::dcp
