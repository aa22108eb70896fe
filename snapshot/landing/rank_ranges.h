// SPDX-License-Identifier: Apache-2.0
//
// RankRanges is a set of ranks, kept as ranges that do not touch: a job of a million ranks of
// which three have come takes three ranges.
//
// Thread safety: const methods may be called concurrently.
// Units: ranks, from 0.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace ckptfs {

class RankRanges {
 public:
  // False if the rank is there already.
  bool Insert(uint32_t rank);
  bool Contains(uint32_t rank) const;
  uint64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // Returns the ranks below `world` that are neither here nor `elsewhere`, as "0, 2-7 and 9 more".
  // Its time depends on the ranges, not on `world`.
  std::string MissingText(uint32_t world, const std::set<uint32_t>& elsewhere = {}) const;
  // Returns how many ranks below `world` it lacks.
  uint64_t Missing(uint32_t world) const { return size_ < world ? world - size_ : 0; }

 private:
  std::map<uint32_t, uint32_t> ranges_;  // first, last
  uint64_t size_ = 0;
};

}  // namespace ckptfs
