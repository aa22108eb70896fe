// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/fuse_features.h"

namespace ckptfs {

bool SetFeature(fuse_conn_info& connection, uint32_t capability, bool wanted) {
  if (wanted) return fuse_set_feature_flag(&connection, capability);
  fuse_unset_feature_flag(&connection, capability);
  return false;
}

bool RequestPassthrough(fuse_conn_info& connection) {
  if (!fuse_set_feature_flag(&connection, FUSE_CAP_PASSTHROUGH)) return false;
  connection.max_backing_stack_depth = FUSE_BACKING_STACKED_OVER;
  return true;
}

bool RequestDirectIoMmap(fuse_conn_info& connection) {
  return fuse_set_feature_flag(&connection, FUSE_CAP_DIRECT_IO_ALLOW_MMAP);
}

void RequestKillPrivileges(fuse_conn_info& connection) {
  fuse_set_feature_flag(&connection, FUSE_CAP_HANDLE_KILLPRIV_V2);
}

void RefuseInterrupts(fuse_conn_info& connection) { connection.no_interrupt = 1; }

int OpenBacking(fuse_req_t request, int fd) { return fuse_passthrough_open(request, fd); }

void CloseBacking(fuse_req_t request, int backing_id) {
  fuse_passthrough_close(request, backing_id);
}

void SetBacking(fuse_file_info& info, int backing_id) { info.backing_id = backing_id; }

}  // namespace ckptfs
