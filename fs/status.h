// SPDX-License-Identifier: Apache-2.0
//
// The status of a mount as JSON text: /.ckptfs/status and `ckptfs status`.
//
// Thread safety: reads what is internally synchronised; the numbers are of
// moments close to each other.

#pragma once

#include <string>

#include "fs/filesystem.h"
#include "fs/serve/open_files.h"
#include "fs/tree/namespace.h"

namespace ckptfs {

// BLOCKS: on looking at the sources of the steps in use, where `depth` is kAll.
std::string RenderStatus(const Namespace& names, const OpenFiles& files, const Counters& counters,
                         const FilesystemOptions& options, StatusDepth depth);

}  // namespace ckptfs
