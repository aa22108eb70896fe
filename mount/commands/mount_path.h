// SPDX-License-Identifier: Apache-2.0
//
// A path in a live mount, taken apart: whose it is and what it names there.
//
// Thread safety: used by the process's first thread only.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs {

struct MountPath {
  std::string mountpoint;
  std::string store;               // the store that is mounted there
  std::vector<std::string> parts;  // below the mount point, links resolved as far as they are there

  // "RUN/ID" of what lies in a step; "" above.
  std::string Step() const;
  // The parts below run/RUN/step/ID/: {"view", "tp2", "rank0", "model.pt"}.  REQUIRES: a step.
  std::vector<std::string> Inside() const;
};

// Takes an existing path, or one whose last components are not there (a layout that is
// refused).  kNotFound if it is in no mount of ckptfs.
// BLOCKS: on looking at the path.
Result<MountPath> TakeApart(const std::string& path);

// The parts of "a/b"; "//" is one slash.
std::vector<std::string> SplitPath(std::string_view path);

// "RUN/ID" of "run/RUN/step/ID/view", as a daemon tells it; "" if it is not that.
std::string StepOfView(std::string_view view);

// "a/b" of the parts from `first` on.
std::string JoinedPath(const std::vector<std::string>& parts, size_t first);

}  // namespace ckptfs
