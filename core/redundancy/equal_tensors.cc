// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/equal_tensors.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "core/base/digest.h"

namespace ckptfs {
namespace {

using Candidates = std::vector<size_t>;  // into TensorCopies::tensors()

// A run's bytes, as far as they are known.
struct RunDigest {
  Digest digest;
  bool constant = false;
  std::array<std::byte, 16> element{};  // the first one
};

RunDigest DigestRun(std::span<const std::byte> bytes, uint32_t width) {
  RunDigest run;
  run.digest = DigestOf(bytes);
  std::memcpy(run.element.data(), bytes.data(), std::min<size_t>(width, run.element.size()));
  run.constant = width <= run.element.size() &&
                 std::memcmp(bytes.data(), bytes.data() + width, bytes.size() - width) == 0;
  return run;
}

class EqualSearcher {
 public:
  EqualSearcher(const TensorCopies& copies, BlobReader& blobs, const RedundancyOptions& options)
      : copies_(copies), blobs_(blobs), options_(options) {}

  Result<EqualSearch> Run();

 private:
  struct Item {
    size_t candidate = 0;  // into its stage's
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  std::vector<Candidates> BySize() const;
  Result<std::vector<Candidates>> BySamples(const std::vector<Candidates>& sets);
  Result<std::vector<EqualBytes>> ByAll(const std::vector<Candidates>& sets);
  // Reads the items, whose bytes are of `tensors`; in the items' order.
  Result<std::vector<RunDigest>> Digests(const Candidates& tensors, const std::vector<Item>& items,
                                         std::string_view stage);
  DType DTypeOf(const CopiedTensor& tensor) const {
    return copies_.model().atom(tensor.copies[0]).dtype;
  }

  const TensorCopies& copies_;
  BlobReader& blobs_;
  const RedundancyOptions& options_;
  uint64_t bytes_read_ = 0;
};

// Sets of several that have one key each, in the order of their first.
template <class Key>
std::vector<Candidates> SetsOf(const std::vector<std::pair<Key, size_t>>& keyed) {
  std::map<Key, Candidates> by_key;
  for (const auto& [key, tensor] : keyed) by_key[key].push_back(tensor);
  std::vector<Candidates> sets;
  for (auto& [key, tensors] : by_key)
    if (tensors.size() > 1) sets.push_back(std::move(tensors));
  std::sort(sets.begin(), sets.end());
  return sets;
}

Candidates Flatten(const std::vector<Candidates>& sets) {
  Candidates all;
  for (const Candidates& set : sets) all.insert(all.end(), set.begin(), set.end());
  return all;
}

std::vector<Candidates> EqualSearcher::BySize() const {
  std::vector<std::pair<std::pair<DType, uint64_t>, size_t>> keyed;
  for (size_t i = 0; i < copies_.tensors().size(); ++i) {
    const CopiedTensor& tensor = copies_.tensors()[i];
    if (tensor.averaged || tensor.copies.empty()) continue;
    keyed.emplace_back(std::pair(DTypeOf(tensor), tensor.bytes()), i);
  }
  return SetsOf(keyed);
}

Result<std::vector<RunDigest>> EqualSearcher::Digests(const Candidates& tensors,
                                                      const std::vector<Item>& items,
                                                      std::string_view stage) {
  std::vector<RunDigest> runs(items.size());
  uint64_t total = 0;
  for (const Item& item : items) total += item.bytes;
  JobOptions job;
  job.threads = options_.threads;
  if (options_.progress && !items.empty()) job.progress = options_.progress(stage);
  const auto read = [&](size_t i) -> Result<uint64_t> {
    const Item& item = items[i];
    const CopiedTensor& tensor = copies_.tensors()[tensors[item.candidate]];
    CKPT_ASSIGN_OR_RETURN(const CopyReader reader, CopyReader::Open(copies_, blobs_, tensor, 0));
    std::vector<std::byte> bytes(item.bytes);
    CKPT_RETURN_IF_ERROR(reader.Read(item.offset, bytes));
    runs[i] = DigestRun(bytes, tensor.width);
    return item.bytes;
  };
  CKPT_RETURN_IF_ERROR(RunWorkList(items.size(), total, job, read));
  bytes_read_ += total;
  return runs;
}

// The first unit, one in the middle and the last one.
Result<std::vector<Candidates>> EqualSearcher::BySamples(const std::vector<Candidates>& sets) {
  const Candidates tensors = Flatten(sets);
  std::vector<Item> items;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CopiedTensor& tensor = copies_.tensors()[tensors[i]];
    const uint64_t bytes = tensor.bytes(), unit = std::min(kCompareUnit, bytes);
    const uint64_t middle = bytes / 2 / kCompareUnit * kCompareUnit;
    for (const uint64_t offset : {uint64_t{0}, std::min(middle, bytes - unit), bytes - unit})
      if (items.empty() || items.back().candidate != i || items.back().offset != offset)
        items.push_back({i, offset, unit});
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<RunDigest> runs, Digests(tensors, items, "samples"));
  std::vector<std::pair<std::tuple<DType, uint64_t, std::vector<Digest>>, size_t>> keyed;
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t tensor = tensors[items[i].candidate];
    if (keyed.empty() || keyed.back().second != tensor) {
      const CopiedTensor& of = copies_.tensors()[tensor];
      keyed.push_back({{DTypeOf(of), of.bytes(), {}}, tensor});
    }
    std::get<2>(keyed.back().first).push_back(runs[i].digest);
  }
  return SetsOf(keyed);
}

Result<std::vector<EqualBytes>> EqualSearcher::ByAll(const std::vector<Candidates>& sets) {
  const Candidates tensors = Flatten(sets);
  std::vector<Item> items;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = copies_.tensors()[tensors[i]].bytes();
    for (uint64_t at = 0; at < bytes; at += kDigestBlock)
      items.push_back({i, at, std::min(kDigestBlock, bytes - at)});
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<RunDigest> runs, Digests(tensors, items, "digests"));
  std::vector<std::pair<std::tuple<DType, uint64_t, std::vector<Digest>>, size_t>> keyed;
  std::map<size_t, bool> constant;
  for (size_t i = 0, first = 0; i < items.size(); ++i) {
    const size_t tensor = tensors[items[i].candidate];
    if (keyed.empty() || keyed.back().second != tensor) {
      const CopiedTensor& of = copies_.tensors()[tensor];
      keyed.push_back({{DTypeOf(of), of.bytes(), {}}, tensor});
      constant[tensor] = true;
      first = i;
    }
    std::get<2>(keyed.back().first).push_back(runs[i].digest);
    constant[tensor] &= runs[i].constant && runs[i].element == runs[first].element;
  }
  std::vector<EqualBytes> groups;
  for (const Candidates& set : SetsOf(keyed)) {
    EqualBytes group{copies_.tensors()[set[0]].bytes(), constant[set[0]], {}};
    for (const size_t tensor : set) group.atoms.push_back(copies_.tensors()[tensor].atom);
    groups.push_back(std::move(group));
  }
  return groups;
}

Result<EqualSearch> EqualSearcher::Run() {
  CKPT_ASSIGN_OR_RETURN(const std::vector<Candidates> likely, BySamples(BySize()));
  EqualSearch search;
  CKPT_ASSIGN_OR_RETURN(search.groups, ByAll(likely));
  std::stable_sort(search.groups.begin(), search.groups.end(),
                   [](const EqualBytes& a, const EqualBytes& b) { return a.bytes > b.bytes; });
  search.bytes_read = bytes_read_;
  return search;
}

}  // namespace

Result<EqualSearch> FindEqualTensors(const TensorCopies& copies, BlobReader& blobs,
                                     const RedundancyOptions& options) {
  return EqualSearcher(copies, blobs, options).Run();
}

}  // namespace ckptfs
