// SPDX-License-Identifier: Apache-2.0

#include "core/check/source_state.h"

#include "core/base/strings.h"
#include "core/model/read_blobs.h"

namespace ckptfs {

std::string_view SourceStateName(SourceState state) {
  switch (state) {
    case SourceState::kSound: return "sound";
    case SourceState::kTouched: return "touched";
    case SourceState::kStale: return "stale";
    case SourceState::kMissing: return "missing";
  }
  return "missing";
}

SourceReport LookAtSources(const StepModel& model, BlobReader& blobs) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  SourceReport report;
  for (uint32_t i = 0; i < read.size(); ++i) {
    if (read[i] == 0) continue;
    const auto look = blobs.LookAt(BlobIndex{i});
    if (look && *look == Look::kAll) {
      if (report.state == SourceState::kSound) {
        report = {SourceState::kTouched,
                  StrCat(blobs.PathOf(BlobIndex{i}),
                         " was touched since it was adopted: its first reader compares all "
                         "of its bytes")};
      }
      continue;
    }
    Status same = look ? Status() : Fail(Error(look.error()));
    if (look && *look == Look::kSample) same = blobs.Check(BlobIndex{i});
    if (same) continue;
    Error error = std::move(same).error();
    const SourceState state =
        error.code == ErrorCode::kStale ? SourceState::kStale : SourceState::kMissing;
    return SourceReport{state, std::move(error.message)};
  }
  return report;
}

}  // namespace ckptfs
