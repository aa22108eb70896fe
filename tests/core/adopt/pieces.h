// SPDX-License-Identifier: Apache-2.0
//
// Pieces is a made-up step as ZeRO-3 leaves it: every atom is spread over 32
// rank files, with junk between.  Byte b of atom a is (a * 37 + b * 11 + b / 256)
// mod 256, so that a misplaced byte is seen.
//
// Thread safety: none.
// Lifetime: removes its directory when destroyed.

#pragma once

#include <string>
#include <vector>

#include "core/model/step_model.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::testing_support {

class Pieces {
 public:
  static constexpr uint32_t kRanks = 32;

  // An atom of `elements`, as many as go into each rank's file padded at the
  // end, `gap` bytes behind the one before.
  AtomIndex Add(const std::string& name, const std::string& kind, uint64_t elements,
                DType dtype = DType::kF32, uint64_t gap = 9000);
  // Writes the files and stamps them: once, after all are added.  They are of mode
  // 0640, user 1000 and group 100, where we may give them away.
  void Write();
  void Restrict(uint32_t rank, uint32_t mode);

  StepModel& model() { return model_; }
  std::string PathOf(uint32_t rank) const {
    return directory_.path() + "/rank" + std::to_string(rank);
  }
  const std::string& directory() const { return directory_.path(); }
  static std::string Truth(const StepModel& model, AtomIndex atom);

 private:
  TemporaryDirectory directory_;
  StepModel model_;
  std::vector<std::string> files_ = std::vector<std::string>(kRanks);
};

// All bytes of an atom as it is stored, through the plan reader; the error's
// name if that fails.
std::string ReadWhole(const StepModel& model, AtomIndex atom);

}  // namespace ckptfs::testing_support
