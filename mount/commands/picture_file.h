// SPDX-License-Identifier: Apache-2.0
//
// A picture as a file: its kind is told by the file's name.
//
// Thread safety: pure but for the file.

#pragma once

#include <string>

#include "core/base/result.h"
#include "mount/commands/picture.h"

namespace ckptfs {

// True for .png, false for .svg; kInvalid for other names.
Result<bool> IsPng(const std::string& path);

// Writes it; half a picture does not stay.
Status WritePicture(const std::string& path, const Picture& picture);

}  // namespace ckptfs
