// SPDX-License-Identifier: Apache-2.0
//
// BoxIndex is where everything lies in a DCP directory whose tensors are stacks: a tensor with one
// atom for each place along its first dim (the layers of a model), each cut into the same boxes.
// Files hold archives one after the other without gaps, entry by entry:
//
//   __<file>_0.distcp   of each entry, place by place: its boxes of that file
//
// Boxes of one entry have the same offsets in each place, so that the index takes no memory for the
// places.  An entry may have another's bytes under a key of its own.
//
// Thread safety: immutable once built.
// Lifetime: refers to the step's atoms by index.
// Units: bytes of a data file; elements where shapes are.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/object_archives.h"

namespace ckptfs::dcp {

struct BoxEntry {
  // A part of an atom, and the file that has it.
  struct Part {
    Shape begin;
    Shape shape;
    uint32_t file = 0;
  };
  std::string key;
  std::vector<PathStep> path;
  bool tensor = false;  // an object has none of the following
  DType dtype = DType::kF32;
  Shape shape;                   // with the dim of a stack
  bool stacked = false;          // dim 0 counts the atoms
  std::vector<AtomIndex> atoms;  // of one shape; one if it is not stacked
  std::vector<Part> parts;       // of each atom, which they tile
  ObjectBytes object;            // of what is not a tensor; it lies in file 0
  // The entry before it that has the same tensor under another key.
  std::optional<size_t> bytes_of;
};

class BoxIndex {
 public:
  // kUnsupported for a number of boxes that no reader could hold.
  // REQUIRES: parts are inside of their atoms, and their files below `files`.
  static Result<BoxIndex> Build(std::vector<BoxEntry> entries, uint32_t files);

  const std::vector<BoxEntry>& entries() const { return entries_; }

  struct Box {
    Shape begin;  // in the tensor
    Shape shape;
  };
  uint64_t BoxCount(size_t entry) const;
  Box BoxAt(size_t entry, uint64_t box) const;

  struct Place {
    uint64_t rank = 0;  // the file
    uint64_t offset = 0;
    uint64_t length = 0;
  };
  // Where a box of a tensor lies; an object has box 0.
  Place PlaceOf(size_t entry, uint64_t box) const;

  uint64_t ranks() const { return sizes_.size(); }
  // 0: there is no such file.  REQUIRES: rank < ranks().
  uint64_t FileSize(uint64_t rank) const { return sizes_[rank]; }
  Status AppendFile(uint64_t rank, PlanBuilder& plan) const;

  uint64_t MemoryBytes() const;

 private:
  // By part of an entry: its archive, and its offset among the entry's boxes of one place and file.
  struct Laid {
    std::shared_ptr<const TensorArchive> archive;
    uint64_t within = 0;
  };
  // By entry and file.
  struct Run {
    uint64_t begin = 0;   // of the first place
    uint64_t length = 0;  // of each place
  };

  Status Lay(TensorArchives& archives);
  // The index of the entry that has the bytes.
  size_t BytesOf(size_t entry) const { return entries_[entry].bytes_of.value_or(entry); }
  const Run& RunOf(size_t entry, uint64_t file) const {
    return runs_[entry * sizes_.size() + file];
  }
  void AppendBox(size_t entry, size_t place, size_t part, PlanBuilder& plan) const;

  std::vector<BoxEntry> entries_;
  std::vector<std::vector<Laid>> laid_;  // by entry and part
  std::vector<Run> runs_;                // row-major [entry][file]
  std::vector<uint64_t> sizes_;          // of files
};

}  // namespace ckptfs::dcp
