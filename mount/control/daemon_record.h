// SPDX-License-Identifier: Apache-2.0
//
// DaemonRecord is the file that a daemon leaves beside its control socket, for commands that ask
// after it when it does not answer any more: who it is, where it logs, and by the file's time when
// it last lived.
//
//   <socket directory>/<name of its socket>.json
//     {"store", "mountpoint", "pid", "version", "started_ns", "start_ticks", "log", "again"}
//
// It goes with the daemon; one that was killed leaves it.
//
// Thread safety: a record is one thread's; the functions are pure over the files.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

struct DaemonFacts {
  std::string store;
  std::string mountpoint;  // empty: a daemon without a mount
  int pid = 0;
  std::string version;
  int64_t started_ns = 0;
  std::string log;
  std::string again;        // the command that starts it, for a shell
  int64_t seen_ns = 0;      // its last sign of life, at most kBeatSeconds before its end
  int64_t start_ticks = 0;  // tells its process from a later one of the same pid
};

class DaemonRecord {
 public:
  static constexpr int kBeatSeconds = 10;

  // pid, version and times are this process's and now.
  static Result<std::unique_ptr<DaemonRecord>> Write(const std::string& store,
                                                     const std::string& mountpoint,
                                                     const std::string& log,
                                                     const std::string& again);
  ~DaemonRecord();
  DaemonRecord(const DaemonRecord&) = delete;
  DaemonRecord& operator=(const DaemonRecord&) = delete;

  // Still alive.
  void Beat() const;

 private:
  DaemonRecord(std::string path, Descriptor file)
      : path_(std::move(path)), file_(std::move(file)) {}
  const std::string path_;
  // Open as long as the record is there: so no successor's file gets its inode number.
  const Descriptor file_;
};

// The records of this user's daemons on `store` (absolute; empty: any), those that are gone
// included.
std::vector<DaemonFacts> FindDaemonRecords(std::string_view store);
// True if the process that wrote the record is there.
bool IsAlive(const DaemonFacts& daemon);
// True if a process (OpenProcess) ends within that time.
bool EndsWithin(const Descriptor& process, int milliseconds);
// Removes the record of a daemon that is gone, when its mount has been cleaned up.
void RemoveDaemonRecord(const DaemonFacts& daemon);

}  // namespace ckptfs
