// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/bucket_layout.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

// Models have some dozens of sizes, and where two of them end at borders one is a coincidence.
constexpr size_t kMaxPlacesAtOne = 8;
constexpr uint64_t kMaxLookups = uint64_t{1} << 30;

bool Has(const std::vector<uint64_t>& sorted, uint64_t number) {
  return std::ranges::binary_search(sorted, number);
}

// True if every share's border is one of the bucket, and all borders in `others` are such.
bool AreShares(const BucketShape& bucket, const std::vector<uint64_t>& others, uint64_t ranks) {
  if (ranks == 0 || bucket.padded % ranks != 0) return false;
  const uint64_t share = bucket.padded / ranks;
  if (share == 0 || bucket.elements / share >= bucket.borders.size()) return false;
  if (std::ranges::any_of(others, [&](uint64_t border) { return border % share != 0; })) {
    return false;
  }
  for (uint64_t at = share; at < bucket.elements; at += share) {
    if (!Has(bucket.borders, at)) return false;
  }
  return true;
}

// The borders inside the bucket that no parameter has.
std::vector<uint64_t> OthersOf(const BucketShape& bucket, const std::vector<BucketPlace>& lie) {
  std::vector<uint64_t> explained = {0, bucket.elements};
  for (const BucketPlace& place : lie) {
    explained.push_back(place.begin);
    explained.push_back(place.begin + place.elements);
  }
  std::ranges::sort(explained);
  std::vector<uint64_t> out;
  std::ranges::set_difference(bucket.borders, explained, std::back_inserter(out));
  return out;
}

// The job may divide its ranks into instances that each have all of a buffer, so a part of `ranks`
// is right, too.
Status CheckShares(const BucketShape& bucket, const std::vector<BucketPlace>& lie,
                   std::optional<uint64_t> ranks) {
  const std::vector<uint64_t> others = OthersOf(bucket, lie);
  const uint64_t most =
      std::min<uint64_t>(ranks.value_or(bucket.borders.size()), bucket.borders.size());
  for (uint64_t some = most; some > 0; --some) {
    if (ranks && *ranks % some != 0) continue;
    if (AreShares(bucket, others, some)) return {};
  }
  return Refuse("chunks begin where neither a parameter nor a rank's share begins",
                others.empty() ? std::string() : StrCat(", at element ", others.front()));
}

}  // namespace

Result<std::vector<BucketPlace>> PlacesOf(const BucketShape& bucket,
                                          std::span<const uint64_t> sizes) {
  if (bucket.borders.size() * (sizes.size() + 1) > kMaxLookups) {
    return Refuse("it has ", bucket.borders.size(), " borders for parameters of ", sizes.size(),
                  " sizes, too many to be tried");
  }
  std::vector<BucketPlace> out;
  for (const uint64_t begin : bucket.borders) {
    if (begin % kParameterAlignment != 0) continue;
    size_t places = 0;
    for (const uint64_t size : sizes) {
      if (size > bucket.elements - begin) break;
      if (size == 0 || !Has(bucket.borders, begin + size)) continue;
      if (++places > kMaxPlacesAtOne) {
        return Refuse("parameters of more than ", kMaxPlacesAtOne, " sizes may begin at element ",
                      begin);
      }
      out.push_back({begin, size});
    }
  }
  return out;
}

Result<std::vector<BucketPlace>> LieOf(const BucketShape& bucket,
                                       std::span<const BucketPlace> fitting,
                                       std::optional<uint64_t> ranks) {
  std::vector<BucketPlace> out;
  uint64_t at = 0;
  while (at < bucket.elements) {
    const auto here = std::ranges::equal_range(fitting, at, {}, &BucketPlace::begin);
    if (here.size() > 1) {
      return Refuse("at element ", at, " parameters of several sizes begin");
    }
    if (here.empty()) {
      return Refuse("at element ", at,
                    " no parameter of the rank begins whose stored weight is the master, cast");
    }
    out.push_back(here.front());
    const uint64_t end = at + here.front().elements;
    if (end == bucket.elements) break;
    at = AlignUp(end, kParameterAlignment);
    if (at > bucket.elements) {
      return Refuse("it ends at element ", bucket.elements, ", within a padding");
    }
  }
  CKPT_RETURN_IF_ERROR(CheckShares(bucket, out, ranks));
  return out;
}

}  // namespace ckptfs::megatron
