// SPDX-License-Identifier: Apache-2.0
//
// ControlServer is the daemon's end of the control socket (control_protocol.h).
// Only root and the daemon's own user are answered.
//
// Thread safety: owns its threads; requests run concurrently with FUSE ones.
// Lifetime: the filesystem must outlive it; the destructor waits for requests
// in progress and removes the socket.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "fs/filesystem.h"
#include "mount/control/daemon_status.h"
#include "mount/control/step_readers.h"

namespace ckptfs {

class ControlServer {
 public:
  // A daemon does these with itself when it is asked; each may be empty.
  struct Hooks {
    // Reads the daemon's configuration file again, and says what became of it.
    std::function<Result<nlohmann::json>()> reload;
    // Has another program take this one's place, soon after the answer.
    std::function<Status(const std::string& program)> upgrade;
  };
  // A socket left by a dead daemon of the same mount point is replaced.  Without a
  // filesystem it is that of a daemon without a mount, whose mount point is empty.
  // `status`: what it says of itself; its filesystem is the one that requests are for.
  // `catalogue`: of which steps in memory are read; null: none are.  It must outlive the server.
  // `hf_config`: the directory of --hf-config, empty without it.
  // `generation`: how many programs served the mount before.
  static Result<std::unique_ptr<ControlServer>> Start(std::string store, std::string mountpoint,
                                                      DaemonStatus status,
                                                      StepCatalogue* catalogue = nullptr,
                                                      std::string hf_config = {}, Hooks hooks = {},
                                                      uint64_t generation = 0);
  ~ControlServer();
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;

 private:
  ControlServer(std::string store, std::string mountpoint, DaemonStatus status,
                StepCatalogue* catalogue, std::string hf_config, Hooks hooks, uint64_t generation)
      : store_(std::move(store)),
        mountpoint_(std::move(mountpoint)),
        filesystem_(status.filesystem),
        status_(std::move(status)),
        hf_config_(std::move(hf_config)),
        hooks_(std::move(hooks)),
        generation_(generation),
        readers_(catalogue == nullptr ? nullptr : std::make_unique<StepReaders>(*catalogue)) {}
  Status Listen();
  void Accept();
  void Converse(Descriptor connection);
  // Empty if somebody else answers on the connection from now on.
  std::string Answer(const std::string& request, Descriptor& connection);
  Status BeginReading(const nlohmann::json& request, Descriptor& connection);
  std::string AnswerOfMount(const nlohmann::json& request, const std::string& operation);

  const std::string store_;
  const std::string mountpoint_;
  Filesystem* const filesystem_;
  const DaemonStatus status_;
  const std::string hf_config_;
  const Hooks hooks_;
  const uint64_t generation_;
  const std::unique_ptr<StepReaders> readers_;
  std::string path_;
  uint64_t inode_ = 0;  // of our socket: a successor's must stay
  Descriptor listener_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace ckptfs
