// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/directory_index.h"

#include <map>
#include <tuple>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

// torch makes about a kilobyte of objects of each; 405B parameters on 1,024 ranks
// have 3.5 million.
constexpr uint64_t kMaxBoxes = uint64_t{1} << 25;
constexpr uint64_t kMaxOffsets = uint64_t{1} << 25;

}  // namespace

Result<DirectoryIndex> DirectoryIndex::Build(std::vector<Entry> entries, const Mesh& mesh,
                                             uint64_t cut_from) {
  DirectoryIndex index;
  index.entries_ = std::move(entries);
  CKPT_RETURN_IF_ERROR(index.MakeCuts(mesh, cut_from));
  CKPT_RETURN_IF_ERROR(index.MakeColumns(mesh));
  CKPT_RETURN_IF_ERROR(index.SumUp());
  return index;
}

Status DirectoryIndex::MakeCuts(const Mesh& mesh, uint64_t cut_from) {
  TensorArchives archives;
  uint64_t boxes = 0;
  for (const Entry& entry : entries_) {
    Cut cut;
    if (entry.tensor) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(entry.shape, entry.dtype));
      const bool content = std::holds_alternative<Content>(entry.body);
      cut.cut = bytes >= cut_from && bytes > 0 && !content && mesh.ranks() > 1;
      cut.boxes = cut.cut ? MeshCut(entry.shape, entry.tp_dim, mesh) : MeshCut::Whole(entry.shape);
      boxes += cut.boxes->count();
      for (const auto& sample : cut.boxes->Samples()) {
        if (!sample || content) continue;
        CKPT_ASSIGN_OR_RETURN(cut.archives[cut.boxes->KindOf(*sample)],
                              archives.Of(entry.dtype, cut.boxes->At(*sample).shape));
      }
    }
    if (const auto* object = std::get_if<ObjectBytes>(&entry.body)) {
      cut.own_length = (*object)->size();
    } else if (const auto* content = std::get_if<Content>(&entry.body)) {
      CKPT_ASSIGN_OR_RETURN(cut.own_length, (*content)->Size(kArchiveFolder));
    }
    cuts_.push_back(std::move(cut));
    if (boxes > kMaxBoxes) {
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("cut for ", mesh.ranks(), " ranks it would have more than ",
                               kMaxBoxes, " chunks, more than readers hold")}
                      .Needing("ask for a smaller mesh: its files load at this mesh, too"));
    }
  }
  return {};
}

// Ranks are told apart cut by cut: those that had one column and have boxes of one
// kind still have one.  Boxes of one dtype and shape are cut alike.
Status DirectoryIndex::MakeColumns(const Mesh& mesh) {
  column_of_rank_.assign(mesh.ranks(), 0);
  uint32_t columns = 1;
  std::map<std::tuple<DType, Shape, std::optional<uint32_t>>, bool> seen;
  for (size_t e = 0; e < entries_.size(); ++e) {
    const Entry& entry = entries_[e];
    if (!cuts_[e].cut) continue;
    if (!seen.emplace(std::tuple(entry.dtype, entry.shape, entry.tp_dim), true).second) continue;
    const MeshCut& cut = *cuts_[e].boxes;
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> next;  // by column and kind
    for (uint64_t i = 0; i < cut.count(); ++i) {
      uint32_t& column = column_of_rank_[cut.At(i).rank];
      const auto [at, added] = next.try_emplace({column, cut.KindOf(i)}, columns);
      if (added) ++columns;
      column = at->second;
    }
  }
  std::map<uint32_t, uint32_t> dense;
  for (uint64_t rank = 0; rank < column_of_rank_.size(); ++rank) {
    const auto [at, added] =
        dense.try_emplace(column_of_rank_[rank], static_cast<uint32_t>(dense.size()));
    if (added) rank_of_column_.push_back(rank);
    column_of_rank_[rank] = at->second;
  }
  return {};
}

Status DirectoryIndex::SumUp() {
  const size_t columns = rank_of_column_.size();
  cut_size_.assign(columns, 0);
  for (size_t e = 0; e < entries_.size(); ++e) {
    Cut& cut = cuts_[e];
    if (!cut.cut) continue;
    cut.at = offsets_.size();
    if (cut.at + columns > kMaxOffsets) {
      return Fail(ErrorCode::kUnsupported, StrCat("its tensors are too uneven to be cut for ",
                                                  column_of_rank_.size(), " ranks"));
    }
    for (size_t c = 0; c < columns; ++c) {
      offsets_.push_back(cut_size_[c]);
      const auto box = cut.boxes->IndexOf(rank_of_column_[c]);
      const uint64_t length = box ? LengthOf(e, *box) : 0;
      CKPT_ASSIGN_OR_RETURN(cut_size_[c], CheckedAdd(cut_size_[c], length, "data file"));
    }
  }
  for (size_t e = 0; e < entries_.size(); ++e) {
    if (cuts_[e].cut) continue;
    cuts_[e].at = cut_size_[column_of_rank_[0]] + whole_size_;
    CKPT_ASSIGN_OR_RETURN(whole_size_, CheckedAdd(whole_size_, LengthOf(e, 0), "data file"));
  }
  return {};
}

uint64_t DirectoryIndex::LengthOf(size_t entry, uint64_t box) const {
  const Cut& cut = cuts_[entry];
  return cut.own_length > 0 ? cut.own_length : cut.archives[cut.boxes->KindOf(box)]->size();
}

DirectoryIndex::Place DirectoryIndex::PlaceOf(size_t entry, uint64_t box) const {
  const Cut& cut = cuts_[entry];
  if (!cut.cut) return {0, cut.at, LengthOf(entry, box)};
  const uint64_t rank = cut.boxes->At(box).rank;
  return {rank, offsets_[cut.at + column_of_rank_[rank]], LengthOf(entry, box)};
}

uint64_t DirectoryIndex::FileSize(uint64_t rank) const {
  return cut_size_[column_of_rank_[rank]] + (rank == 0 ? whole_size_ : 0);
}

Status DirectoryIndex::AppendEntry(size_t e, uint64_t box, PlanBuilder& plan) const {
  const Entry& entry = entries_[e];
  if (const auto* object = std::get_if<ObjectBytes>(&entry.body)) {
    plan.Literal(*object);
    return {};
  }
  if (const auto* content = std::get_if<Content>(&entry.body)) {
    return ArchiveContent(**content).AppendTo(plan, kArchiveFolder);
  }
  const TensorArchive& archive = *cuts_[e].archives[CutOf(e).KindOf(box)];
  plan.Literal(archive.head);
  if (const auto* atom = std::get_if<AtomIndex>(&entry.body)) {
    MeshCut::Box part = CutOf(e).At(box);
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(part.shape));
    LocalTensor local{part.shape, {}};
    local.pieces.push_back(
        {part.shape, std::move(part.begin), 0, RowMajorStrides(part.shape), 1.0});
    plan.Atom(*atom, std::make_shared<const LocalTensor>(std::move(local)), 0, elements,
              entry.dtype);
  } else if (const auto* few = std::get_if<ShortTensor>(&entry.body)) {
    plan.Literal(few->bytes);
  } else {
    plan.Zeros(archive.payload);
  }
  plan.Literal(archive.tail);
  return {};
}

Status DirectoryIndex::AppendFile(uint64_t rank, PlanBuilder& plan) const {
  for (size_t e = 0; e < entries_.size(); ++e) {
    if (!cuts_[e].cut) continue;
    const auto box = cuts_[e].boxes->IndexOf(rank);
    if (box) CKPT_RETURN_IF_ERROR(AppendEntry(e, *box, plan));
  }
  if (rank != 0) return {};
  for (size_t e = 0; e < entries_.size(); ++e) {
    if (!cuts_[e].cut) CKPT_RETURN_IF_ERROR(AppendEntry(e, 0, plan));
  }
  return {};
}

uint64_t DirectoryIndex::MemoryBytes() const {
  uint64_t bytes = sizeof(*this) + column_of_rank_.size() * sizeof(uint32_t) +
                   (offsets_.size() + 2 * cut_size_.size()) * sizeof(uint64_t);
  for (const Entry& entry : entries_) {
    bytes += sizeof(Entry) + sizeof(Cut) + entry.key.capacity() +
             4 * entry.shape.size() * sizeof(uint64_t);
    if (const auto* object = std::get_if<ObjectBytes>(&entry.body)) {
      bytes += (*object)->size() / static_cast<uint64_t>(object->use_count());
    }
    for (const PathStep& step : entry.path) bytes += sizeof(step) + step.text.capacity();
  }
  return bytes;
}

}  // namespace ckptfs::dcp
