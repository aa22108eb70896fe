// SPDX-License-Identifier: Apache-2.0
//
// ArchiveBuilder puts together one `.pt` file of a view: a pickle tree whose
// tensors have storages that are parts of atoms, of blobs, or literals.
//
// Thread safety: none for a builder; ArchiveContent is immutable once built.
// Lifetime: owns its tree; refers to atoms and blobs of a step by index.
// Units: bytes, except flat ranges (elements).

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"
#include "formats/torch/archive_view.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs {

struct ArchiveContent {
  PickleTree tree;
  std::vector<ArchiveStorage> storages;

  // Exact, without rendering storages.  `folder` is the zip's top folder.
  Result<uint64_t> Size(std::string_view folder) const;
  Result<Plan> MakePlan(std::string_view folder) &&;
  // At the plan's end, as one of several archives in a file.
  Status AppendTo(PlanBuilder& plan, std::string_view folder) &&;
};

class ArchiveBuilder {
 public:
  PickleBuilder& pickle() { return pickle_; }

  // A contiguous tensor over a new storage with these segments, which together
  // have the tensor's bytes.
  Result<NodeId> Tensor(DType dtype, const Shape& shape,
                        std::vector<std::pair<uint64_t, SegmentBody>> parts);
  // The whole atom as `dtype`.
  Result<NodeId> WholeAtom(const StepModel& step, AtomIndex atom, DType dtype);
  // A 0-d atom as its source had it: a Python int or float, or a tensor.
  Result<NodeId> Scalar(const StepModel& step, AtomIndex atom);
  // A document's value, its tensors included.
  Result<NodeId> Value(const Document& document);
  // A value of its tree (ParseDocument) alone, with the tensors in it.
  Result<NodeId> PartOf(const Document& document, PickleRef value);

  ArchiveContent Finish(NodeId root) &&;

 private:
  PickleBuilder pickle_;
  std::vector<ArchiveStorage> storages_;
};

}  // namespace ckptfs
