// SPDX-License-Identifier: Apache-2.0
//
// VerifyStep reads everything a step refers to: every byte of every blob
// (compared with the digests that are recorded of it or of its chunks, those in a
// file beside it among them, and with the checksums that the file itself holds), every element of
// every atom through the plan reader (averages computed), all copies of
// replicated atoms against each other, stored weights against their stored
// masters, and, on request, every float for NaN and infinity.
//
// Thread safety: may run beside readers of the same step.
// Lifetime: model and blobs must outlive the call.
// Units: bytes; element numbers are of the row-major atom.

#pragma once

#include <compare>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/blob/record_sums.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct VerifyDefect {
  std::string subject;  // a file's path, or an atom: "name (kind)"
  std::string rule;     // the rule that is broken, with the element and the files
  auto operator<=>(const VerifyDefect&) const = default;
};

struct VerifyReport {
  uint64_t blobs = 0;
  uint64_t blob_bytes = 0;
  uint64_t summed_bytes = 0;      // of them compared with digests or checksums
  uint64_t unsummed_blobs = 0;    // files without checksums of their own
  std::string unsummed;           // one of these
  uint64_t atoms_compared = 0;    // with more than one copy
  uint64_t weights_compared = 0;  // with their masters (weight_check.h)
  uint64_t weights_skipped = 0;   // weights that cannot be compared exactly
  std::string skipped;            // one of these
  uint64_t atoms_read = 0;        // others: every element found, averaged, cast
  uint64_t atoms_finite = 0;      // checked for NaN and infinity
  // Files beside the step that nothing is read of (core/model/read_blobs.h) and that are not what
  // they were: a log that grew is not a defect.
  uint64_t changed_notes = 0;
  std::string changed_note;  // one of these, and how
  uint64_t defect_count = 0;
  std::vector<VerifyDefect> defects;  // the first 100 that were found, sorted: files first
};

struct VerifyOptions {
  JobOptions job;
  bool finite = false;
  RecordsOf records;  // empty: files hold no checksums
};

// An error only if the job itself could not run; defects are in the report.
// BLOCKS: until everything is read.
Result<VerifyReport> VerifyStep(const StepModel& step, BlobReader& blobs,
                                const VerifyOptions& options);

}  // namespace ckptfs
