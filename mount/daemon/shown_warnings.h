// SPDX-License-Identifier: Apache-2.0
//
// A new mount warns of these before its command returns: layouts that the step at /view does not
// have, a file that hides it, files that are gone.
//
// Thread safety: the process's first thread only.

#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/store/store.h"
#include "core/view/view_format.h"
#include "mount/daemon/mount_process.h"

namespace ckptfs {

// Where the step is.
struct ShownPlace {
  const MountRequest& request;
  Store& store;
  const std::vector<std::unique_ptr<ViewFormat>>& formats;
  const std::set<std::string>& adopted;  // "RUN/ID", by this mount: their files are there
  const std::string& view_target;        // "run/RUN/step/ID/view"
};

// Each to the log, which is the caller's terminal until the mount answers.
void WarnOfShown(const ShownPlace& place);

}  // namespace ckptfs
