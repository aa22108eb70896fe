// SPDX-License-Identifier: Apache-2.0
//
// The files of a directory that megatron-core's dist_checkpointing writes, and of the one that
// holds such directories.  metadata.json is what says that a directory is of the core
// (dist_checkpointing/core.py): {"sharded_backend": "torch_dist", "sharded_backend_version": 1},
// with two keys more of cores up to 0.18.
//
// Thread safety: pure but for looking at files.

#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kBackendFile = "metadata.json";
inline constexpr std::string_view kTrackerFile = "latest_checkpointed_iteration.txt";

struct DistFiles {
  bool common = false;    // common.pt
  bool metadata = false;  // .metadata
  bool data = false;      // *.distcp
  std::string backend;    // sharded_backend of metadata.json; "" where it does not say one
  uint64_t version = 0;   // of the backend

  // True of a directory of torch_dist, whole or not: common.pt and data files are nobody else's.
  bool IsDist() const { return backend == "torch_dist" || (backend.empty() && common && data); }
};

// Nothing is there where there is no such directory.  BLOCKS: on reading metadata.json.
Result<DistFiles> ListDist(const Root& root, const std::string& directory);
// The same of a directory that was listed: `names` are those of its files.
Result<DistFiles> DistOf(const Root& root, const std::string& directory,
                         std::span<const std::string> names);

// kInvalid names the file without which the save did not finish; kUnsupported a backend's version
// that is not known.
Status CheckFiles(const Root& root, const std::string& directory, const DistFiles& files);

// The directory's name that the tracker beside it tells: "iter_0000007", "release"; nothing
// without a tracker, or if it says something else.
Result<std::optional<std::string>> ReadTracker(const Root& root, const std::string& save);

}  // namespace ckptfs::megatron
