// SPDX-License-Identifier: Apache-2.0
//
// StepMap is the steps of a run by id.  A map with some changes shares what they
// do not touch with the one before, so that taking in a step does not cost what
// all the steps of its run do.
//
// Thread safety: immutable.
// Lifetime: shares the entries.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fs/tree/mounted_step.h"

namespace ckptfs {

class StepMap {
 public:
  struct Change {
    std::string id;
    std::shared_ptr<StepEntry> step;  // null: there is none any more
  };

  // REQUIRES: `changes` are sorted by id, each id once.
  StepMap With(std::vector<Change> changes) const;

  // Null if there is none.
  std::shared_ptr<StepEntry> Find(std::string_view id) const;
  bool empty() const { return chunks_.empty(); }
  size_t size() const;
  std::shared_ptr<StepEntry> latest() const;  // IsOlder than none; null if empty
  int64_t mtime_ns() const;                   // of the newest step

  // visit(id, step) in the order of ids until it is true; whether it was.
  template <class Visit>
  bool Any(Visit&& visit) const {
    for (const auto& chunk : chunks_) {
      for (const Change& kept : chunk->steps) {
        if (visit(kept.id, kept.step)) return true;
      }
    }
    return false;
  }

 private:
  // Neighbours, and what follows from them.
  struct Chunk {
    std::vector<Change> steps;  // sorted, at least one
    std::shared_ptr<StepEntry> latest;
    int64_t mtime_ns = 0;
  };
  // So many steps are copied for a change, and a pointer for each so many others.
  static constexpr size_t kSteps = 64;

  void Append(std::vector<Change> steps);

  std::vector<std::shared_ptr<const Chunk>> chunks_;  // by their ids
};

}  // namespace ckptfs
