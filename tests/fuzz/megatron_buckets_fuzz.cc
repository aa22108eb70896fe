// SPDX-License-Identifier: Apache-2.0
//
// Buffers of Megatron's DistributedOptimizer: keys, where parameters lie in a bucket, and whose
// they are.  What is accepted lies in the bucket, one behind the other, begins at multiples of 64,
// and every place has a parameter of its values.
//
//   byte: which part   key:     the rest as a text
//                      layout:  ranks, padding, sizes of parameters (up to a zero), borders
//                      order:   parameters of two ranks, then places of two buffers of each

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/megatron/buckets/bucket_keys.h"
#include "formats/megatron/buckets/bucket_layout.h"
#include "formats/megatron/buckets/bucket_order.h"
#include "tests/fuzz/target.h"

namespace {

using namespace ckptfs::megatron;
using Bytes = std::span<const uint8_t>;

uint8_t Take(Bytes& bytes) {
  if (bytes.empty()) return 0;
  const uint8_t first = bytes[0];
  bytes = bytes.subspan(1);
  return first;
}

void CheckKey(Bytes bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (const auto key = BucketKeyOf(text)) {
    FUZZ_CHECK(!key->kind.empty() && text.ends_with(key->kind) && text.starts_with(key->chain));
  }
  if (const auto object = GroupObjectKeyOf(text)) FUZZ_CHECK(text.ends_with(object->what));
}

void CheckLayout(Bytes bytes) {
  BucketShape bucket{0, 0, {0}};
  const uint64_t ranks = Take(bytes);
  const uint64_t padding = Take(bytes);
  std::vector<uint64_t> sizes;
  while (const uint8_t size = Take(bytes)) sizes.push_back(16 * size);
  while (!bytes.empty()) bucket.borders.push_back(bucket.borders.back() + 16 * (Take(bytes) + 1));
  bucket.elements = bucket.borders.back();
  bucket.padded = bucket.elements + padding;
  std::ranges::sort(sizes);
  const auto rest = std::ranges::unique(sizes);
  sizes.erase(rest.begin(), rest.end());
  const auto places = PlacesOf(bucket, sizes);
  if (!places) return;
  const auto lie = LieOf(bucket, *places, ranks == 0 ? std::nullopt : std::optional(ranks));
  if (!lie) return;
  uint64_t at = 0;
  for (const BucketPlace& place : *lie) {
    FUZZ_CHECK(place.begin % kParameterAlignment == 0);
    FUZZ_CHECK(place.begin >= at && place.begin - at < kParameterAlignment);
    FUZZ_CHECK(std::ranges::binary_search(sizes, place.elements));
    at = place.begin + place.elements;
  }
  FUZZ_CHECK(at <= bucket.elements && bucket.elements - at < kParameterAlignment);
}

void CheckOrder(Bytes bytes) {
  std::vector<std::vector<OrderedParameter>> ranks(2);
  for (auto& rank : ranks) {
    for (int count = Take(bytes) % 16; count > 0; --count) {
      const uint8_t one = Take(bytes);
      std::optional<uint32_t> layer;
      if (one & 1) layer = one >> 1 & 3;
      rank.push_back({static_cast<uint32_t>(one >> 3 & 7), layer, static_cast<uint32_t>(one >> 5)});
    }
  }
  std::vector<OrderedBuffer> buffers;
  for (uint32_t b = 0; b < 4; ++b) {
    OrderedBuffer buffer{b % 2, b / 2, {}};
    for (int count = Take(bytes) % 16; count > 0; --count) buffer.places.push_back(Take(bytes) & 7);
    buffers.push_back(std::move(buffer));
  }
  const auto owners = DecideOrder(ranks, buffers, [](uint32_t, uint32_t) { return std::string(); });
  if (!owners) return;
  FUZZ_CHECK(owners->size() == buffers.size());
  for (size_t b = 0; b < buffers.size(); ++b) {
    FUZZ_CHECK((*owners)[b].size() == buffers[b].places.size());
    for (size_t i = 0; i < buffers[b].places.size(); ++i) {
      const auto& rank = ranks[buffers[b].rank];
      FUZZ_CHECK((*owners)[b][i] < rank.size());
      FUZZ_CHECK(rank[(*owners)[b][i]].values == buffers[b].places[i]);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  switch (Take(bytes) % 3) {
    case 0: CheckKey(bytes); break;
    case 1: CheckLayout(bytes); break;
    default: CheckOrder(bytes);
  }
  return 0;
}
