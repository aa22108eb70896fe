// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/rank_parts.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

namespace ckptfs::megatron {
namespace {

using Numbers = std::span<const uint64_t>;

struct Chunk {
  size_t number = 0;
  Numbers offsets;
  Numbers sizes;
};

uint64_t VolumeOf(Numbers sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), uint64_t{1}, std::multiplies<>());
}

// The one dimension along which sorted chunks follow each other, from 0 to the end of the tensor;
// nothing if they are not such.  `from`: the first that is not counted.
std::optional<size_t> CutOf(const std::vector<Chunk>& chunks, Numbers whole, size_t from) {
  std::optional<size_t> cut;
  for (size_t d = from; d < whole.size(); ++d) {
    if (chunks.front().sizes[d] == whole[d]) continue;
    if (cut) return std::nullopt;
    cut = d;
  }
  if (!cut) return std::nullopt;
  uint64_t next = 0;
  for (const Chunk& chunk : chunks) {
    for (size_t d = from; d < whole.size(); ++d) {
      if (d == *cut ? chunk.offsets[d] != next
                    : chunk.offsets[d] != 0 || chunk.sizes[d] != whole[d]) {
        return std::nullopt;
      }
    }
    next += chunk.sizes[*cut];
  }
  return next == whole[*cut] ? cut : std::nullopt;
}

// Chunks of one layer, and of one expert, as parts of ranks; none if they are not such.
std::vector<RankPart> PartsOfRanks(std::vector<Chunk> chunks, Numbers whole, const PartsOf& how) {
  const size_t layers = how.stacked ? 1 : 0;
  const size_t from = layers + (how.experts ? 1 : 0);
  const auto begins = [](const Chunk& one, const Chunk& other) {
    return std::ranges::lexicographical_compare(one.offsets, other.offsets);
  };
  std::ranges::sort(chunks, begins);
  size_t sections = 1;
  size_t ranks = 1;
  if (chunks.size() == 1) {
    if (!std::ranges::equal(chunks[0].sizes.subspan(from), whole.subspan(from))) return {};
  } else {
    const auto cut = CutOf(chunks, whole, from);
    if (!cut || chunks.size() % how.tp != 0) return {};
    ranks = how.tp;
    sections = chunks.size() / ranks;
    if (sections > 1 && *cut != from) return {};  // ranks would have their parts interleaved
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].sizes[*cut] != chunks[i - i % ranks].sizes[*cut]) return {};
    }
  }
  std::vector<RankPart> out(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    RankPart& part = out[rank];
    if (chunks.size() > 1) part.tp = static_cast<uint32_t>(rank);
    if (how.experts) part.expert = static_cast<uint32_t>(chunks[0].offsets[layers]);
    for (size_t s = 0; s < sections; ++s) {
      const Chunk& chunk = chunks[s * ranks + rank];
      part.boxes.push_back(
          {chunk.number,
           {chunk.offsets.begin() + static_cast<ptrdiff_t>(layers), chunk.offsets.end()},
           {chunk.sizes.begin() + static_cast<ptrdiff_t>(layers), chunk.sizes.end()}});
      part.elements += VolumeOf(chunk.sizes);
    }
  }
  return out;
}

}  // namespace

std::vector<std::vector<RankPart>> RankPartsOf(const dcp::DcpMetadata& metadata,
                                               const dcp::TensorEntry& tensor, const PartsOf& how) {
  const size_t counted = (how.stacked ? 1 : 0) + (how.experts ? 1 : 0);
  std::vector<std::vector<RankPart>> out(how.stacked ? tensor.shape.front() : 1);
  if (tensor.shape.size() < counted) return out;
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < tensor.chunk_count; ++i) {
    const Chunk chunk{i, metadata.OffsetsOf(tensor, i), metadata.SizesOf(tensor, i)};
    if (VolumeOf(chunk.sizes) == 0) continue;
    for (size_t d = 0; d < counted; ++d) {
      if (chunk.sizes[d] != 1) return out;
    }
    chunks.push_back(chunk);
  }
  const auto counters = [&](const Chunk& chunk) { return chunk.offsets.first(counted); };
  std::ranges::stable_sort(chunks, [&](const Chunk& one, const Chunk& other) {
    return std::ranges::lexicographical_compare(counters(one), counters(other));
  });
  for (size_t begin = 0, end = 0; begin < chunks.size(); begin = end) {
    while (end < chunks.size() &&
           std::ranges::equal(counters(chunks[end]), counters(chunks[begin]))) {
      ++end;
    }
    auto parts = PartsOfRanks({chunks.begin() + static_cast<ptrdiff_t>(begin),
                               chunks.begin() + static_cast<ptrdiff_t>(end)},
                              tensor.shape, how);
    std::vector<RankPart>& layer = out[how.stacked ? chunks[begin].offsets[0] : 0];
    std::ranges::move(parts, std::back_inserter(layer));
  }
  return out;
}

}  // namespace ckptfs::megatron
