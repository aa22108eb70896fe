// SPDX-License-Identifier: Apache-2.0
//
// DaemonStatus is all that a daemon says of itself, as JSON: what `ckptfs status` prints and what
// the metrics are made of.
//
// Thread safety: Render may be called concurrently; so may the parts.
// Lifetime: the filesystem and what the parts use must outlive it.

#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>

#include "fs/filesystem.h"

namespace ckptfs {

struct DaemonStatus {
  using Part = std::function<nlohmann::json()>;

  Filesystem* filesystem = nullptr;  // null: there is no mount
  Part snapshots = {};               // null JSON where none are received
  Part following = {};               // the directories that are followed, as a list
  Part configuration = {};           // the files that options were read from
  Part mirror = {};                  // of `ckptfs ingest`: the directory that jobs write to

  // The filesystem's status, with "process" and a member for each part that there is.
  // BLOCKS: as Filesystem::StatusJson.
  nlohmann::json Render(StatusDepth depth) const;
};

}  // namespace ckptfs
