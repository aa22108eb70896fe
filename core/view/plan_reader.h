// SPDX-License-Identifier: Apache-2.0
//
// PlanReader answers positional reads against a Plan: it finds the segments
// that cover the asked range and fills the caller's buffer from literals, from
// atoms (gathered, cut, averaged, cast), from blobs, or with zeros.  It is
// where a virtual file becomes bytes; nothing here knows about FUSE.
//
// Thread safety: all methods are const and may be called concurrently; there
// is no state per handle.
// Lifetime: plan, model and blobs must outlive the reader; none is owned.
// Units: offsets and lengths are bytes of the virtual file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/view/lent_bytes.h"
#include "core/view/plan.h"

namespace ckptfs {

class PlanReader {
 public:
  // REQUIRES: plan.Validate(model) succeeded.
  PlanReader(const Plan& plan, const StepModel& model, BlobReader& blobs);

  // Fill `out` from `offset` on and return the bytes written, which are fewer
  // than out.size() only at the end of the file (POSIX pread).  On an error
  // `out` is unspecified and no partial count is returned.
  // BLOCKS: on the device where the page cache is cold.
  Result<size_t> Read(uint64_t offset, std::span<std::byte> out) const;

  // The same bytes where they lie, of a range that is long and has all of them in
  // memory; nothing for any other, and for a reason that Read tells.
  std::optional<LentBytes> Lend(uint64_t offset, uint64_t length) const;

  // The same with the arithmetic spread over TBB: for large fills.
  Result<size_t> ReadParallel(uint64_t offset, std::span<std::byte> out) const;

  // The origins of [offset, offset + length), at most `limit` of them.
  Result<std::vector<Origin>> Explain(uint64_t offset, uint64_t length, size_t limit) const;

 private:
  const Plan& plan_;
  const StepModel& model_;
  BlobReader& blobs_;
};

}  // namespace ckptfs
