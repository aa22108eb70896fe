// SPDX-License-Identifier: Apache-2.0

#include <cerrno>

#include "mount/fuse/fuse_features.h"

namespace ckptfs {

bool SetFeature(fuse_conn_info& connection, uint32_t capability, bool wanted) {
  if (!wanted) {
    connection.want &= ~capability;
    return false;
  }
  connection.want |= connection.capable & capability;
  return (connection.capable & capability) != 0;
}

bool RequestPassthrough(fuse_conn_info&) { return false; }

bool RequestDirectIoMmap(fuse_conn_info&) { return false; }

void RequestKillPrivileges(fuse_conn_info&) {}

void RefuseInterrupts(fuse_conn_info&) {}

int OpenBacking(fuse_req_t, int) {
  errno = ENOSYS;
  return 0;
}

void CloseBacking(fuse_req_t, int) {}

void SetBacking(fuse_file_info&, int) {}

}  // namespace ckptfs
