// SPDX-License-Identifier: Apache-2.0
//
// Documents of a step that are true of its source's own names alone: a step under other names does
// not have them.
//
// Thread safety: constants.

#pragma once

#include <string_view>

namespace ckptfs {

// Where the tensors of safetensors files begin, which may be shown whole
// (formats/huggingface/whole_files.h).
inline constexpr std::string_view kSafetensorsFiles = "safetensors_files";

}  // namespace ckptfs
