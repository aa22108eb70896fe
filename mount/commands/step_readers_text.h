// SPDX-License-Identifier: Apache-2.0
//
// Says in words which users of this machine see a step, and which file or directory keeps the
// others out.
//
// Thread safety: may be called concurrently.

#pragma once

#include <string>

#include "core/blob/blob_reader.h"
#include "core/store/store.h"

namespace ckptfs {

struct ReadersText {
  std::string who;       // "all users"; "alice (uid 1000) and group ml (gid 100)"
  std::string kept_out;  // "/data/run7 (mode 0700) keeps others out"; empty if all users see it
};

// Root always sees it.  BLOCKS: on looking at each file and the directories above.
ReadersText DescribeReaders(const Step& step, const BlobReader& blobs);

}  // namespace ckptfs
