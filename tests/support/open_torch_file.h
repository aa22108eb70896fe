// SPDX-License-Identifier: Apache-2.0
//
// A torch file by its path, for tests.
//
// Thread safety: pure but for reading the file.

#pragma once

#include <string>

#include "core/io/file_root.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

inline Result<TorchFile> OpenTorchFile(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenLocalFile(path));
  return TorchFile::Open(file);
}

}  // namespace ckptfs
