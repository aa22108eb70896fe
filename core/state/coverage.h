// SPDX-License-Identifier: Apache-2.0
//
// The coverage proof, which Assembler::Finish and the loader of a manifest ask of every atom; with
// the blobs next to a defect so that the message can name files.
//
// Thread safety: pure functions; a ProofBudget is one thread's.
// Units: elements.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/fragment.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct CoverageDefect {
  std::string rule;             // "elements [8, 16) of what rank 2 holds are in no file"
  std::vector<uint32_t> blobs;  // beside the gap, or the two that overlap
};

// Limits what the proofs of one file take together beyond a time that its size bounds.  It
// counts steps of fragments with gaps between them, and of pieces that lie around these.
class ProofBudget {
 public:
  // Some tenths of a second, which is thousands of times what a real checkpoint takes.
  static constexpr uint64_t kMaxSteps = uint64_t{1} << 25;

  // False once it is spent.
  bool Spend(uint64_t steps) { return (steps_ += steps) <= kMaxSteps; }
  bool spent() const { return steps_ > kMaxSteps; }

 private:
  uint64_t steps_ = 0;
};

// Nothing if every element of the atom is covered exactly once, the series are
// in order and every element a piece needs is in exactly one fragment.  A gather whose proof
// exceeds the budget has a defect.
std::optional<CoverageDefect> FindCoverageDefect(const Gather& gather, const Shape& atom,
                                                 ProofBudget& budget);

// ProveCoverage (assembler.h) within the budget of the file that the gather is of.
Status ProveCoverage(const Gather& gather, const Shape& atom, ProofBudget& budget);

// Sorts by (local, flat_begin), untangles interleaved series and joins those
// that continue each other.  The result means the same fragments.
void NormaliseSeries(std::vector<FragmentSeries>& series);

// Extends `series` by the fragment if it continues it.
bool ExtendSeries(FragmentSeries& series, uint32_t local, const Fragment& fragment);

}  // namespace ckptfs
