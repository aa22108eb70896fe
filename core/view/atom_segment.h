// SPDX-License-Identifier: Apache-2.0
//
// The functions that segment.h has for every segment, for segments that show an atom.
//
// Thread safety: pure apart from the blob reader.
// Units: as in segment.h.

#pragma once

#include "core/view/segment.h"

namespace ckptfs {

// `length` is the segment's.
Status ValidateAtomSegment(const AtomSegment& body, uint64_t length, const StepModel& model);

Status ReadAtomSegment(const AtomSegment& body, const StepModel& model, BlobReader& blobs,
                       uint64_t begin, uint64_t end, std::byte* out);

bool LendAtomSegment(const AtomSegment& body, const StepModel& model, uint64_t begin, uint64_t end,
                     Lender& lender);

void VisitAtomSources(const AtomSegment& body, const StepModel& model, uint64_t begin, uint64_t end,
                      SourceVisitor& visitor);

// `start`: the segment's first byte in the file.
Status ExplainAtomSegment(const AtomSegment& body, uint64_t start, const StepModel& model,
                          uint64_t begin, uint64_t end, size_t limit, std::vector<Origin>& origins);

}  // namespace ckptfs
