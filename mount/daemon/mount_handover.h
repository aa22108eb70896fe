// SPDX-License-Identifier: Apache-2.0
//
// A mount outlives the program that serves it: `ckptfs upgrade` has a daemon run another program
// in its own process, and a service manager starts one anew that was killed.  Either finds the
// kernel's connection, and what is to be known of it, among the descriptors that were left for it
// (snapshot/receive/descriptor_store.h):
//
//   mount.device    /dev/fuse
//   mount.state     a memory file: MountState, as CBOR
//   mount.backing   once for each file that the kernel reads by itself
//
// A program that was killed has left no names and no open files: the kernel looks names up again,
// and reads of what was open then fail with ESTALE, unless the kernel reads the file by itself.
//
// Thread safety: the process's first thread only, but for CheckSuccessor and Succession.
// Lifetime: the descriptors of a ServedMount's backings are numbers in its state; they are for
// Filesystem::TakeOver, which owns them from then on.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "fs/handover.h"
#include "mount/fuse/fuse_session.h"
#include "snapshot/receive/descriptor_store.h"

namespace ckptfs {

struct MountState {
  std::string store;
  std::string mountpoint;
  std::string log;          // where it logs
  std::string program;      // ThisProgram of who left it
  uint64_t generation = 0;  // programs that served the mount before
  int64_t process = 0;      // its number: a successor in the same one was asked for
  std::string greeting;     // FuseConnection's
  Handover kernel;
  std::map<uint64_t, int> backing_ids;  // the kernel's, by handle
};

struct ServedMount {
  MountState state;
  Descriptor device;
};

// Programs that do not have the same version of the state cannot take each other's place.
inline constexpr int kMountStateVersion = 1;
// `ckptfs upgrade --accepts` prints this, with exit code 0, if it can.
inline constexpr std::string_view kAcceptance = "ckptfs takes over this mount\n";

std::vector<uint8_t> EncodeMountState(const MountState& state);
// kUnsupported for another version, kInvalid for what is not one.
Result<MountState> DecodeMountState(std::span<const uint8_t> bytes);

// Tells this program's file from another one's, replaced ones included.
std::string ThisProgram();

// The mount that was left for this process; nothing if none was.
Result<std::optional<ServedMount>> TakeServedMount();
// True if one was left, before it is taken.
bool IsMountLeft();

// Asks a program whether it can take this one's place.  BLOCKS: at most ten seconds.
Status CheckSuccessor(const std::string& program);
// Runs a program, with these words, in this process.  Where it cannot be run this program's own
// file is run in its stead.  Returns only if both fail.
// `arenas`: what a service manager keeps of snapshots, under its names.
Error BecomeSuccessor(const std::string& program, const std::vector<std::string>& words,
                      const MountState& state, Descriptor device,
                      std::vector<DescriptorStore::Kept> arenas);

// The program that is to take this one's place, once somebody has asked for it.
//
// Thread safety: all methods may be called concurrently.
class Succession {
 public:
  Succession();
  // Checks the program, then wakes who polls.  BLOCKS: as CheckSuccessor.
  Status Ask(const std::string& program);
  int asked_fd() const { return asked_.get(); }
  std::string program() const;

 private:
  const Descriptor asked_;
  mutable Mutex mutex_;
  std::string program_ GUARDED_BY(mutex_);
};

// Gives the service manager, if there is one that keeps descriptors, what a program needs that is
// started after this one was killed.
void KeepMount(const MountState& state, const Descriptor& device);
// Takes that back: the mount ends with this process.
void ForgetMount();

}  // namespace ckptfs
