// SPDX-License-Identifier: Apache-2.0

#include "mount/mirror/act_as.h"

#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// The umask belongs to a struct that threads share until one asks for its own.
bool HasOwnUmask() {
  thread_local const bool own = ::unshare(CLONE_FS) == 0;
  return own;
}

// glibc's setgroups changes all threads; these system calls change the calling one.
bool SetGroups(const std::vector<gid_t>& groups) {
  return ::syscall(SYS_setgroups, groups.size(), groups.data()) == 0;
}

// They return the value from before; a second call tells whether the first was obeyed.
bool SetUser(uid_t uid) {
  ::syscall(SYS_setfsuid, uid);
  return static_cast<uid_t>(::syscall(SYS_setfsuid, -1)) == uid;
}

bool SetGroup(gid_t gid) {
  ::syscall(SYS_setfsgid, gid);
  return static_cast<gid_t>(::syscall(SYS_setfsgid, -1)) == gid;
}

// Changes one effective capability of the calling thread; true if it is another one now.
bool ChangeEffective(unsigned capability, bool have) {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  uint32_t& word = data[capability / 32].effective;
  const uint32_t bit = uint32_t{1} << (capability % 32);
  if (((word & bit) != 0) == have) return false;
  word ^= bit;
  return ::syscall(SYS_capset, &header, data) == 0;
}

}  // namespace

ActAs::ActAs(const MirrorCaller& caller) {
  if (!HasOwnUmask()) {
    error_ = EPERM;
    return;
  }
  ::umask(caller.umask);
  if (::geteuid() != 0) {
    error_ = caller.uid == ::geteuid() ? 0 : EPERM;
    return;
  }
  gid_ = ::getegid();
  if (caller.uid == 0 && caller.gid == gid_) return;
  root_ = true;
  const bool done =
      (caller.uid == 0 || SetGroups(caller.groups)) && SetGroup(caller.gid) && SetUser(caller.uid);
  if (!done) error_ = EPERM;
}

ActAs::~ActAs() {
  ::umask(077);  // what is made without a caller is nobody else's
  if (!root_) return;
  const bool back = SetUser(0) && SetGroup(gid_) && SetGroups({});
  CKPT_CHECK(back);  // the thread would serve others as this caller
}

WithoutSetIdRight::WithoutSetIdRight() : dropped_(ChangeEffective(CAP_FSETID, false)) {}

WithoutSetIdRight::~WithoutSetIdRight() {
  if (dropped_) ChangeEffective(CAP_FSETID, true);
}

void GiveUpResourceRight() { ChangeEffective(CAP_SYS_RESOURCE, false); }

Status CheckActAs() {
  bool own = false;
  std::thread([&own] { own = HasOwnUmask(); }).join();
  if (own) return {};
  return Fail(ErrorCode::kPermission,
              "a thread of this process cannot have an umask of its own (unshare): a sandbox "
              "forbids it, and files that jobs make would get wrong modes");
}

}  // namespace ckptfs
