// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/file_checks.h"

#include "core/base/parallel.h"
#include "core/model/read_blobs.h"

namespace ckptfs {
namespace {

template <class Check>
Status ForReadFiles(const StepModel& step, const Check& check) {
  const std::vector<uint8_t> read = FindReadBlobs(step);
  std::vector<Status> found(read.size());
  ParallelFor(read.size(), [&](size_t i) {
    if (read[i] != 0) found[i] = check(BlobIndex{static_cast<uint32_t>(i)});
  });
  for (const Status& status : found) CKPT_RETURN_IF_ERROR(status);
  return {};
}

}  // namespace

Status CheckFilesBefore(const StepModel& step, BlobReader& blobs) {
  return ForReadFiles(step, [&](BlobIndex blob) { return blobs.Check(blob); });
}

Status CheckFilesAfter(const StepModel& step, BlobReader& blobs) {
  CKPT_RETURN_IF_ERROR(blobs.CheckOpen());
  return ForReadFiles(step, [&](BlobIndex blob) { return blobs.CheckAgain(blob); });
}

}  // namespace ckptfs
