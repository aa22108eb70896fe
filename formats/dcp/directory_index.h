// SPDX-License-Identifier: Apache-2.0
//
// DirectoryIndex is where everything lies in a DCP directory: which boxes of each
// entry are in which data file, at which offset, how long.  Files hold archives one
// after the other without gaps:
//
//   __0_0.distcp      boxes of rank 0, then the entries that are not cut
//   __<rank>_0.distcp boxes of that rank, in the order of the entries
//
// Tensors of at least kCutFrom bytes are cut for the mesh, each rank's boxes in its
// own file; what is smaller stays whole.  Ranks whose boxes have the same lengths
// have the same offsets: they share a column, so that an index of 3.5 million boxes
// takes some megabytes.
//
// Thread safety: immutable once built.
// Lifetime: refers to the step's atoms and blobs by index.
// Units: bytes of a data file.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/mesh_cut.h"
#include "formats/dcp/object_archives.h"

namespace ckptfs::dcp {

inline constexpr uint64_t kCutFrom = 1 << 20;

class DirectoryIndex {
 public:
  // kUnsupported for a number of boxes that no reader could hold.
  static Result<DirectoryIndex> Build(std::vector<Entry> entries, const Mesh& mesh,
                                      uint64_t cut_from = kCutFrom);

  const std::vector<Entry>& entries() const { return entries_; }
  // The plan of a tensor.
  const MeshCut& CutOf(size_t entry) const { return *cuts_[entry].boxes; }
  uint64_t BoxCount(size_t entry) const { return CutOf(entry).count(); }
  MeshCut::Box BoxAt(size_t entry, uint64_t box) const { return CutOf(entry).At(box); }

  struct Place {
    uint64_t rank = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
  };
  // Where a box of a tensor lies; an object has box 0.
  Place PlaceOf(size_t entry, uint64_t box) const;

  uint64_t ranks() const { return column_of_rank_.size(); }
  // 0: there is no such file.  REQUIRES: rank < ranks().
  uint64_t FileSize(uint64_t rank) const;
  Status AppendFile(uint64_t rank, PlanBuilder& plan) const;

  uint64_t MemoryBytes() const;

 private:
  struct Cut {
    std::optional<MeshCut> boxes;  // a tensor's
    // By the boxes' kind; what has an archive of its own has none.
    std::array<std::shared_ptr<const TensorArchive>, MeshCut::kKinds> archives;
    uint64_t own_length = 0;  // of that
    bool cut = false;
    // For a tensor that is not cut: its offset in rank 0's file.  For one that is cut: the
    // first of its offsets, one per column.
    uint64_t at = 0;
  };

  Status MakeCuts(const Mesh& mesh, uint64_t cut_from);
  Status MakeColumns(const Mesh& mesh);
  Status SumUp();
  uint64_t LengthOf(size_t entry, uint64_t box) const;
  Status AppendEntry(size_t entry, uint64_t box, PlanBuilder& plan) const;

  std::vector<Entry> entries_;
  std::vector<Cut> cuts_;  // by entry
  std::vector<uint32_t> column_of_rank_;
  std::vector<uint64_t> rank_of_column_;  // any of it
  std::vector<uint64_t> offsets_;         // row-major [cut entry][column]
  std::vector<uint64_t> cut_size_;        // by column: of all its boxes
  uint64_t whole_size_ = 0;               // of what is not cut
};

}  // namespace ckptfs::dcp
