// SPDX-License-Identifier: Apache-2.0
//
// The file that hides its step from users who could see it by all of its other files and by the
// directories they lie in.  safetensors, from 0.8 on, gives its files mode 0600 whatever the umask
// is, beside files of torch that all may read; a user sees a step who may read every file of it.
//
// Thread safety: pure functions over the filesystem.
// BLOCKS: on a look at every file and directory of the step.

#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/blob/blob_reader.h"
#include "core/io/file.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct ClosedFile {
  std::string path;
  OwnerAndMode access;
  size_t more = 0;  // other files that are closed as well
};

// `blobs` says where the files lie.  Nothing if the directories keep the same users out, or if the
// group may read every file and nobody else any: that is how a step is shared on purpose.
std::optional<ClosedFile> FindClosedFile(const StepModel& step, const BlobReader& blobs);

// "only user 0 may read /ckpt/run/model.safetensors (mode 0600); `chmod a+r` shows the step"
std::string DescribeClosedFile(const ClosedFile& file);

}  // namespace ckptfs
