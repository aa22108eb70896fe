// SPDX-License-Identifier: Apache-2.0
//
// The life of one mount's daemon: open the store, adopt what was asked, mount,
// serve until somebody unmounts or a signal comes, and leave nothing behind.
//
// Thread safety: REQUIRES the process's first thread; starts the others.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/tools/model_files.h"
#include "fs/filesystem.h"
#include "mount/daemon/adoption.h"
#include "mount/daemon/configuration.h"
#include "mount/daemon/snapshot_service.h"
#include "mount/logging.h"

namespace ckptfs {

struct MountRequest {
  std::string store;       // absolute
  std::string mountpoint;  // absolute
  std::vector<AdoptRequest> adopt;
  std::optional<std::string> run;
  std::optional<std::string> step;
  bool follow = false;
  std::vector<Layout> layouts;
  std::optional<ModelFiles> models;  // for steps that do not have theirs
  std::string hf_config;             // the directory they were read from; empty: none
  RootMap roots;
  std::optional<ServingMode> mode;
  uint64_t budget_bytes = 0;              // 0: the filesystem's default
  std::optional<uint64_t> reserve_bytes;  // absent: the filesystem's default
  SnapshotRequest snapshots;              // but for its store
  uint64_t read_ahead_kib = 16384;        // 0: leave the kernel's
  unsigned threads = 0;
  bool clone_fd = false;
  bool allow_other = false;
  bool mkdir = false;
  bool nonempty = false;           // the mount point may have files in it, which are hidden
  std::string again;               // the command that makes this mount, for a shell
  std::vector<std::string> words;  // the same for execve, from the command's name on
  std::string log;                 // "stderr", "syslog", a file; empty: <store>/log/...
  LogFormat log_format = LogFormat::kText;
  std::string metrics_listen;  // ParseMetricsAddress; empty: nowhere
  ConfigurationRequest configuration;
};

// `ready` is called once when the mount answers; then returns when it ended.
Status RunMount(const MountRequest& request, const std::function<void()>& ready);

}  // namespace ckptfs
