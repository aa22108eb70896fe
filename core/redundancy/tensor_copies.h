// SPDX-License-Identifier: Apache-2.0
//
// TensorCopies lists the tensors that the files of a step hold, and each copy of one as
// something that can be read by itself: the whole tensor in row-major order, from the fragments
// of that copy alone.  Tensors that are computed (casts) or stand in the index are not listed,
// nor are the copies of a side blob, nor a copy whose bytes lie where those of a copy that is
// listed before do.
//
// Thread safety: immutable once made; Read and MarkFiles may be called concurrently.
// Lifetime: blobs must outlive a Reader; the step may go.
// Units: elements of the whole tensor; of packed dtypes an element is a byte.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

struct CopiedTensor {
  AtomIndex atom{};  // of the step
  uint64_t elements = 0;
  uint32_t width = 1;             // bytes
  std::vector<AtomIndex> copies;  // of TensorCopies::model(); none if all lie elsewhere
  bool averaged = false;          // the copies may differ
  uint64_t bytes() const { return elements * width; }
};

class TensorCopies {
 public:
  explicit TensorCopies(const StepModel& step);

  const std::vector<CopiedTensor>& tensors() const { return tensors_; }
  // The step's blobs and parameters; its atoms are the copies.
  const StepModel& model() const { return model_; }

  // Calls visit(blob, elements) for the files that hold the copy, a file several times.
  // kDataLoss if some element is nowhere.
  Status VisitFiles(const CopiedTensor& tensor, size_t copy,
                    const std::function<void(uint32_t, uint64_t)>& visit) const;
  // Sets files[i] to the blob that holds element first + i of the copy.
  Status MarkFiles(const CopiedTensor& tensor, size_t copy, uint64_t first,
                   std::span<uint32_t> files) const;

 private:
  using Places = std::map<Digest, std::vector<AtomIndex>>;
  void Add(const Atom& atom, AtomIndex index, Places& places);

  StepModel model_;
  std::vector<CopiedTensor> tensors_;
};

// Reads one copy.
class CopyReader {
 public:
  static Result<CopyReader> Open(const TensorCopies& copies, BlobReader& blobs,
                                 const CopiedTensor& tensor, size_t copy);
  // Fills `out` with the bytes from `offset` on of the whole tensor.
  // REQUIRES: they are within it.  BLOCKS: on the device.
  Status Read(uint64_t offset, std::span<std::byte> out) const;

 private:
  CopyReader(const StepModel& model, BlobReader& blobs, Plan plan, std::string name)
      : model_(&model), blobs_(&blobs), plan_(std::move(plan)), name_(std::move(name)) {}
  const StepModel* model_;
  BlobReader* blobs_;
  Plan plan_;
  std::string name_;
};

}  // namespace ckptfs
