// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/tensor_copies.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "core/model/side_blob.h"
#include "core/view/plan_reader.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"
#include "core/view/whole_atom.h"

namespace ckptfs {
namespace {

// Where the bytes of a gather lie.
Digest PlaceOf(const Gather& gather) {
  std::string text;
  for (const FragmentSeries& series : gather.series) {
    for (const uint64_t number :
         {uint64_t{series.local}, uint64_t{series.count}, series.flat_begin, series.flat_step,
          series.elements, uint64_t{series.blob}, static_cast<uint64_t>(series.blob_step),
          series.offset, static_cast<uint64_t>(series.offset_step)})
      text.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  return DigestOf(text);
}

Status Hole(const StepModel& model, AtomIndex atom) {
  return Fail(ErrorCode::kDataLoss, StrCat(AtomLabel(model, atom), ": an element is in no file"));
}

// The file of a packed tensor, whose elements cannot be told apart.
uint32_t FileOfPacked(const Gather& gather) {
  return gather.series.empty() ? 0 : gather.series.front().blob;
}

}  // namespace

TensorCopies::TensorCopies(const StepModel& step) {
  model_.roots = step.roots;
  model_.blobs = step.blobs;
  model_.parameters = step.parameters;
  Places places;
  for (size_t i = 0; i < step.atoms.size(); ++i) {
    const AtomIndex index{static_cast<uint32_t>(i)};
    if (!IsStoredInFiles(step.atoms[i].source)) continue;
    Atom atom = step.atoms[i];
    if (IsPacked(step, atom)) TakeFirstCopy(atom.source);
    Add(atom, index, places);
  }
}

void TensorCopies::Add(const Atom& atom, AtomIndex index, Places& places) {
  CopiedTensor tensor;
  tensor.atom = index;
  tensor.averaged = IsAveraged(atom.source);
  const uint64_t elements = ElementCount(atom.shape).value_or(0);
  tensor.width = std::max<uint32_t>(ByteWidth(atom.dtype), 1);
  tensor.elements = ByteWidth(atom.dtype) == 0 ? SegmentBytes(elements, atom.dtype) : elements;
  if (tensor.elements == 0) return;
  for (const Gather& gather : atom.source.gathers) {
    std::vector<AtomIndex>& same = places[PlaceOf(gather)];
    const bool listed = std::any_of(same.begin(), same.end(), [&](AtomIndex other) {
      const Atom& before = model_.atom(other);
      return before.source.gathers[0] == gather && before.dtype == atom.dtype;
    });
    if (listed) continue;
    Atom copy;
    copy.parameter = atom.parameter;
    copy.optimizer = atom.optimizer;
    copy.kind = atom.kind;
    copy.dtype = atom.dtype;
    copy.shape = atom.shape;
    copy.relation = atom.relation;
    copy.source.gathers.push_back(gather);
    same.push_back(AtomIndex{static_cast<uint32_t>(model_.atoms.size())});
    tensor.copies.push_back(same.back());
    model_.atoms.push_back(std::move(copy));
  }
  tensors_.push_back(std::move(tensor));
}

Status TensorCopies::VisitFiles(const CopiedTensor& tensor, size_t copy,
                                const std::function<void(uint32_t, uint64_t)>& visit) const {
  const Atom& atom = model_.atom(tensor.copies[copy]);
  const Gather& gather = atom.source.gathers[0];
  if (ByteWidth(atom.dtype) == 0) return visit(FileOfPacked(gather), tensor.elements), Status();
  const RunsEnd how = ForEachSourceRun(gather, WholeTensor(atom.shape), 0, tensor.elements,
                                       [&](const SourceRun& run) {
                                         visit(static_cast<uint32_t>(run.blob), run.count);
                                         return true;
                                       });
  return how == RunsEnd::kDone ? Status() : Hole(model_, tensor.copies[copy]);
}

Status TensorCopies::MarkFiles(const CopiedTensor& tensor, size_t copy, uint64_t first,
                               std::span<uint32_t> files) const {
  const Atom& atom = model_.atom(tensor.copies[copy]);
  const Gather& gather = atom.source.gathers[0];
  if (ByteWidth(atom.dtype) == 0) {
    std::fill(files.begin(), files.end(), FileOfPacked(gather));
    return {};
  }
  const RunsEnd how = ForEachSourceRun(
      gather, WholeTensor(atom.shape), first, first + files.size(), [&](const SourceRun& run) {
        for (uint64_t i = 0; i < run.count; ++i)
          files[run.target - first + i * run.target_stride] = static_cast<uint32_t>(run.blob);
        return true;
      });
  return how == RunsEnd::kDone ? Status() : Hole(model_, tensor.copies[copy]);
}

Result<CopyReader> CopyReader::Open(const TensorCopies& copies, BlobReader& blobs,
                                    const CopiedTensor& tensor, size_t copy) {
  const AtomIndex index = tensor.copies[copy];
  CKPT_ASSIGN_OR_RETURN(Plan plan,
                        PlanOfWholeAtom(copies.model(), index, copies.model().atom(index).dtype));
  return CopyReader(copies.model(), blobs, std::move(plan), AtomLabel(copies.model(), index));
}

Status CopyReader::Read(uint64_t offset, std::span<std::byte> out) const {
  const auto got = PlanReader(plan_, *model_, *blobs_).Read(offset, out);
  if (!got) return Fail(Error(got.error()).WithContext(name_));
  if (*got == out.size()) return {};
  return Fail(ErrorCode::kInternal, StrCat(name_, ": short read of a plan"));
}

}  // namespace ckptfs
