// SPDX-License-Identifier: Apache-2.0
//
// The text of `.status` in an ingest mount: which steps are committed, which are being saved, and
// which were not taken, with the reason.
//
// Root and the owner of the directory see all.  Others see the steps whose directories they can
// open: names in a directory that is closed to them are not told.
//
// Thread safety: a pure function over the filesystem.
// BLOCKS: on opening directories, as the caller.

#pragma once

#include <string>

#include "core/base/descriptor.h"
#include "mount/daemon/follow_service.h"
#include "mount/mirror/act_as.h"

namespace ckptfs {

// `root`: the directory that is followed (absolute in `status`), open.
std::string IngestStatusText(const FollowStatus& status, const Descriptor& root,
                             const MirrorCaller& caller);

}  // namespace ckptfs
