// SPDX-License-Identifier: Apache-2.0
//
// An atom as a list of blocks that threads read one by one: whole, unsharded, in its own dtype.
//
// Thread safety: immutable once made; Read may be called concurrently.
// Lifetime: model and blobs must outlive it.
// Units: elements; kBlockBytes is bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

class AtomBlocks {
 public:
  static constexpr uint64_t kBlockBytes = uint64_t{4} << 20;

  // REQUIRES: the atom's dtype has whole bytes.
  static Result<AtomBlocks> Open(const StepModel& model, BlobReader& blobs, AtomIndex atom);

  uint64_t elements() const { return elements_; }
  uint32_t width() const { return width_; }  // bytes
  // Fills `out` with the elements from `first` on.  REQUIRES: they are within the atom.
  // BLOCKS: on the device.
  Status Read(uint64_t first, std::span<std::byte> out) const;

 private:
  AtomBlocks(const StepModel& model, BlobReader& blobs, Plan plan, uint32_t width,
             uint64_t elements)
      : model_(&model),
        blobs_(&blobs),
        plan_(std::move(plan)),
        width_(width),
        elements_(elements) {}
  const StepModel* model_;
  BlobReader* blobs_;
  Plan plan_;
  uint32_t width_;
  uint64_t elements_;
};

}  // namespace ckptfs
