// SPDX-License-Identifier: Apache-2.0
//
// The coverage proof behind Assembler::Finish and ProveCoverage, with the
// blobs next to a defect so that the message can name files.
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/model/fragment.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct CoverageDefect {
  std::string rule;             // "elements [8, 16) of what rank 2 holds are in no file"
  std::vector<uint32_t> blobs;  // beside the gap, or the two that overlap
};

// Nothing if every element of the atom is covered exactly once, the series are
// in order and every element a piece needs is in exactly one fragment.
std::optional<CoverageDefect> FindCoverageDefect(const Gather& gather, const Shape& atom);

// Sorts by (local, flat_begin), untangles interleaved series and joins those
// that continue each other.  The result means the same fragments.
void NormaliseSeries(std::vector<FragmentSeries>& series);

// Extends `series` by the fragment if it continues it.
bool ExtendSeries(FragmentSeries& series, uint32_t local, const Fragment& fragment);

}  // namespace ckptfs
