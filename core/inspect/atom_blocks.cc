// SPDX-License-Identifier: Apache-2.0

#include "core/inspect/atom_blocks.h"

#include <utility>

#include "core/base/strings.h"
#include "core/view/plan_reader.h"
#include "core/view/whole_atom.h"

namespace ckptfs {

Result<AtomBlocks> AtomBlocks::Open(const StepModel& model, BlobReader& blobs, AtomIndex index) {
  const Atom& atom = model.atom(index);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  CKPT_ASSIGN_OR_RETURN(Plan plan, PlanOfWholeAtom(model, index, atom.dtype));
  return AtomBlocks(model, blobs, std::move(plan), ByteWidth(atom.dtype), elements);
}

Status AtomBlocks::Read(uint64_t first, std::span<std::byte> out) const {
  const PlanReader reader(plan_, *model_, *blobs_);
  CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(first * width_, out));
  if (got == out.size()) return {};
  return Fail(ErrorCode::kInternal, "short read of a plan");
}

}  // namespace ckptfs
