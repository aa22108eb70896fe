// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/box_index.h"

#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

// torch makes about a kilobyte of objects of each.
constexpr uint64_t kMostBoxes = uint64_t{1} << 25;

// The place of a box of a stack in the tensor.
Shape InTensor(const Shape& shape, bool stacked, uint64_t first) {
  if (!stacked) return shape;
  Shape out = {first};
  out.insert(out.end(), shape.begin(), shape.end());
  return out;
}

}  // namespace

Result<BoxIndex> BoxIndex::Build(std::vector<BoxEntry> entries, uint32_t files) {
  BoxIndex index;
  index.entries_ = std::move(entries);
  index.sizes_.assign(files, 0);
  TensorArchives archives;
  CKPT_RETURN_IF_ERROR(index.Lay(archives));
  return index;
}

Status BoxIndex::Lay(TensorArchives& archives) {
  uint64_t boxes = 0;
  laid_.resize(entries_.size());
  runs_.resize(entries_.size() * sizes_.size());
  for (size_t e = 0; e < entries_.size(); ++e) {
    const BoxEntry& entry = entries_[e];
    CKPT_ASSIGN_OR_RETURN(boxes, CheckedAdd(boxes, BoxCount(e), "boxes"));
    if (boxes > kMostBoxes) {
      return Fail(Error{ErrorCode::kUnsupported, StrCat("it would have more than ", kMostBoxes,
                                                        " chunks, more than readers hold")});
    }
    if (entry.bytes_of) continue;
    Run* const runs = &runs_[e * sizes_.size()];
    if (!entry.tensor) runs[0].length = entry.object->size();
    for (const BoxEntry::Part& part : entry.parts) {
      Run& run = runs[part.file];
      CKPT_ASSIGN_OR_RETURN(auto archive,
                            archives.Of(entry.dtype, InTensor(part.shape, entry.stacked, 1)));
      laid_[e].push_back({archive, run.length});
      CKPT_ASSIGN_OR_RETURN(run.length, CheckedAdd(run.length, archive->size(), "data file"));
    }
    const uint64_t places = entry.tensor ? entry.atoms.size() : 1;
    for (size_t f = 0; f < sizes_.size(); ++f) {
      runs[f].begin = sizes_[f];
      CKPT_ASSIGN_OR_RETURN(const uint64_t all, CheckedMul(runs[f].length, places, "data file"));
      CKPT_ASSIGN_OR_RETURN(sizes_[f], CheckedAdd(sizes_[f], all, "data file"));
    }
  }
  return {};
}

uint64_t BoxIndex::BoxCount(size_t e) const {
  const BoxEntry& entry = entries_[e];
  return entry.tensor ? entry.atoms.size() * entry.parts.size() : 1;
}

BoxIndex::Box BoxIndex::BoxAt(size_t e, uint64_t box) const {
  const BoxEntry& entry = entries_[e];
  const BoxEntry::Part& part = entry.parts[box % entry.parts.size()];
  return {InTensor(part.begin, entry.stacked, box / entry.parts.size()),
          InTensor(part.shape, entry.stacked, 1)};
}

BoxIndex::Place BoxIndex::PlaceOf(size_t entry, uint64_t box) const {
  const size_t e = BytesOf(entry);
  if (!entries_[e].tensor) return {0, RunOf(e, 0).begin, RunOf(e, 0).length};
  const size_t part = box % entries_[e].parts.size();
  const uint64_t place = box / entries_[e].parts.size();
  const uint64_t file = entries_[e].parts[part].file;
  const Run& run = RunOf(e, file);
  const Laid& laid = laid_[e][part];
  return {file, run.begin + place * run.length + laid.within, laid.archive->size()};
}

void BoxIndex::AppendBox(size_t e, size_t place, size_t p, PlanBuilder& plan) const {
  const BoxEntry& entry = entries_[e];
  const BoxEntry::Part& part = entry.parts[p];
  const TensorArchive& archive = *laid_[e][p].archive;
  plan.Literal(archive.head);
  LocalTensor local{part.shape, {}};
  local.pieces.push_back({part.shape, part.begin, 0, RowMajorStrides(part.shape), 1.0});
  plan.Atom(entry.atoms[place], std::make_shared<const LocalTensor>(std::move(local)), 0,
            archive.payload / ByteWidth(entry.dtype), entry.dtype);
  plan.Literal(archive.tail);
}

Status BoxIndex::AppendFile(uint64_t file, PlanBuilder& plan) const {
  for (size_t e = 0; e < entries_.size(); ++e) {
    const BoxEntry& entry = entries_[e];
    if (entry.bytes_of) continue;
    if (!entry.tensor && file == 0) plan.Literal(entry.object);
    for (size_t place = 0; place < entry.atoms.size(); ++place) {
      for (size_t p = 0; p < entry.parts.size(); ++p) {
        if (entry.parts[p].file == file) AppendBox(e, place, p, plan);
      }
    }
  }
  return {};
}

uint64_t BoxIndex::MemoryBytes() const {
  uint64_t bytes = sizeof(*this) + runs_.size() * sizeof(Run) + sizes_.size() * sizeof(uint64_t);
  for (const BoxEntry& entry : entries_) {
    bytes += sizeof(BoxEntry) + 2 * entry.key.capacity() + entry.atoms.size() * sizeof(AtomIndex);
    bytes += entry.parts.size() *
             (sizeof(BoxEntry::Part) + sizeof(Laid) + 2 * entry.shape.size() * sizeof(uint64_t));
  }
  return bytes;
}

}  // namespace ckptfs::dcp
