// SPDX-License-Identifier: Apache-2.0
//
// The document of a step that a training tool saved (formats/tools/tool_files.h has what is in it):
// all files of its directory are the save's.
//
// Thread safety: a constant.

#pragma once

#include <string_view>

namespace ckptfs {

inline constexpr std::string_view kDocumentOfTool = "training_tool";

}  // namespace ckptfs
