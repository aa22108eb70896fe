// SPDX-License-Identifier: Apache-2.0
//
// The differences between the libfuse versions that we build against: kernel
// passthrough and mmap of direct-I/O files came with 3.17.  CMake links one of
// fuse_features_317.cc and fuse_features_312.cc; nothing else asks for a version.
//
// Thread safety: as the libfuse calls they wrap.

#pragma once

#include <fuse_lowlevel.h>

#include <cstdint>

namespace ckptfs {

// Ask for (or refuse) a FUSE_CAP_* bit in an init handler; whether the kernel
// has it.
bool SetFeature(fuse_conn_info& connection, uint32_t capability, bool wanted);

// Asks for passthrough, over stacked filesystems (overlay) too.  True if libfuse and the
// kernel have it; the process may still lack the right to use it.
bool RequestPassthrough(fuse_conn_info& connection);

// Ask that files opened for direct I/O may be mapped.
bool RequestDirectIoMmap(fuse_conn_info& connection);

// The filesystem clears set-user-ID bits itself where a file is written, cut or given away.
void RequestKillPrivileges(fuse_conn_info& connection);

// INTERRUPT requests are not wanted: reads are short.
void RefuseInterrupts(fuse_conn_info& connection);

// Register `fd` as a backing file; > 0, or 0 with errno set.
int OpenBacking(fuse_req_t request, int fd);
void CloseBacking(fuse_req_t request, int backing_id);

// Make an open reply a passthrough one.
void SetBacking(fuse_file_info& info, int backing_id);

}  // namespace ckptfs
