// SPDX-License-Identifier: Apache-2.0
//
// The key of a document that holds states which are neither a tensor of their parameter nor a
// number (lists, dicts, None, tensors of other shapes), of any source whose optimizer is torch's:
//
//   kSourceStates { label of the optimizer: { parameter: { state: value } } }
//
// dcp/ shows them under the keys that the job asks for.
//
// Thread safety: constants.

#pragma once

#include <string_view>

namespace ckptfs {

inline constexpr std::string_view kSourceStates = "dcp/states";

}  // namespace ckptfs
