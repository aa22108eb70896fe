// SPDX-License-Identifier: Apache-2.0
//
// ActAs makes the calling thread do file operations as somebody else: with the user, group,
// supplementary groups and umask of a caller.  What it makes then belongs to the caller, and the
// disk's own rules (modes, ACLs, quotas, reserved blocks) are asked for the caller.
//
// A process without root's rights serves only its own user, and changes nothing but the umask.
//
// Thread safety: concerns the calling thread alone, which ends it in the reverse order.
// Lifetime: the thread is itself again when the object goes.

#pragma once

#include <sys/types.h>

#include <vector>

#include "core/base/result.h"

namespace ckptfs {

struct MirrorCaller {
  uid_t uid = 0;
  gid_t gid = 0;
  mode_t umask = 0;
  std::vector<gid_t> groups;  // supplementary; empty where they do not matter
};

class ActAs {
 public:
  explicit ActAs(const MirrorCaller& caller);
  ~ActAs();
  ActAs(const ActAs&) = delete;
  ActAs& operator=(const ActAs&) = delete;

  // 0, or the errno for which the operation must not be done.
  int error() const { return error_; }

 private:
  int error_ = 0;
  bool root_ = false;
  gid_t gid_ = 0;  // the thread's own
};

// Takes rights from the calling thread for a while: the kernel does writes that pass through with
// the rights of who registered the file.  Without CAP_FSETID each write clears set-user-ID bits.
class WithoutSetIdRight {
 public:
  WithoutSetIdRight();
  ~WithoutSetIdRight();
  WithoutSetIdRight(const WithoutSetIdRight&) = delete;
  WithoutSetIdRight& operator=(const WithoutSetIdRight&) = delete;

 private:
  bool dropped_ = false;
};

// Gives up CAP_SYS_RESOURCE for this thread and those that it starts: quotas and the blocks that a
// disk reserves are then kept from users as without the mirror.
void GiveUpResourceRight();

// Success if threads of this process can have an umask of their own.
Status CheckActAs();

}  // namespace ckptfs
