// SPDX-License-Identifier: Apache-2.0
//
// How far apart two words are, for telling a user which word was meant.
//
// Thread safety: pure functions.

#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ckptfs {

// The letters to insert, remove, replace or swap with their neighbour between two words
// (optimal string alignment).  Costs the product of the lengths.
size_t EditDistance(std::string_view a, std::string_view b);

// Those of `words` that are at most `most` errors away from `word`, the nearest ones alone; none
// if `word` is no longer than the errors that it would have.
std::vector<std::string> NearestWords(std::string_view word, std::span<const std::string> words,
                                      size_t most);

// "; do you mean a, b?" of those words; empty if there are none.
std::string MeantText(std::string_view word, std::span<const std::string> words, size_t most = 2);

}  // namespace ckptfs
