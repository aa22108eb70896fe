// SPDX-License-Identifier: Apache-2.0
//
// The life of the daemon of `ckptfs ingest`: it mirrors a directory at a mount point, follows the
// same directory, and commits each step into the store once its save is whole, until somebody
// unmounts or a signal comes.  Mounts of the store show the steps.
//
// Thread safety: REQUIRES the process's first thread; starts the others.

#pragma once

#include <functional>
#include <string>

#include "core/base/result.h"
#include "mount/daemon/adoption.h"
#include "mount/daemon/configuration.h"
#include "mount/logging.h"

namespace ckptfs {

struct IngestMountRequest {
  std::string store;       // absolute
  std::string mountpoint;  // absolute
  AdoptRequest adopt;      // its path: the directory, absolute; made if it is missing
  bool passthrough = true;
  bool mkdir = false;
  bool nonempty = false;
  unsigned threads = 0;  // 0: twice the cores, at least 64
  // As MountRequest's:
  std::string again;
  std::string log;
  LogFormat log_format = LogFormat::kText;
  std::string metrics_listen;
  ConfigurationRequest configuration;
};

// `ready` is called once when the mount answers; then returns when it ended.
Status RunIngest(const IngestMountRequest& request, const std::function<void()>& ready);

}  // namespace ckptfs
