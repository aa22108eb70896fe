// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/copy_compare.h"

#include <algorithm>
#include <cstring>

#include "core/base/strings.h"
#include "core/redundancy/redundancy.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

uint64_t UnitElements(const CopiedTensor& tensor) { return kCompareUnit / tensor.width; }

// Where a unit of all copies does not fit kCompareRoom, it may take this.
constexpr uint64_t kMostRoom = 16 * kCompareRoom;

Status CheckRoom(const TensorCopies& copies, const CopiedTensor& tensor) {
  const uint64_t most = kMostRoom / std::min(kCompareUnit, tensor.bytes());
  if (tensor.copies.size() <= most) return {};
  return Refuse(AtomLabel(copies.model(), tensor.copies.front()), ": it has ", tensor.copies.size(),
                " copies; at most ", most, " of this size are compared");
}

// Some elements of all copies.
struct CopyBlock {
  uint64_t first = 0;
  uint64_t count = 0;
  uint32_t width = 1;
  std::vector<std::vector<std::byte>> bytes;  // of each copy
  std::vector<std::vector<uint32_t>> files;   // of each element of each copy

  size_t copies() const { return bytes.size(); }
  const std::byte* At(size_t copy, uint64_t i) const { return bytes[copy].data() + i * width; }
};

Status Fill(const TensorCopies& copies, BlobReader& blobs, const CopiedTensor& tensor,
            CopyBlock& block) {
  for (size_t c = 0; c < block.copies(); ++c) {
    block.bytes[c].resize(block.count * tensor.width);
    block.files[c].resize(block.count);
    CKPT_RETURN_IF_ERROR(copies.MarkFiles(tensor, c, block.first, block.files[c]));
    CKPT_ASSIGN_OR_RETURN(const CopyReader reader, CopyReader::Open(copies, blobs, tensor, c));
    CKPT_RETURN_IF_ERROR(reader.Read(block.first * tensor.width, block.bytes[c]));
  }
  return {};
}

// One past the last element from `begin` on that is in the same files, in all copies, and in
// the same unit.
uint64_t EndOfCell(const CopyBlock& block, uint64_t begin, uint64_t unit) {
  uint64_t end = std::min(block.count, begin + unit - (block.first + begin) % unit);
  for (const std::vector<uint32_t>& files : block.files) {
    const uint32_t file = files[begin];
    uint64_t i = begin + 1;
    while (i < end && files[i] == file) ++i;
    end = i;
  }
  return end;
}

// Copies that are equal in [begin, end) are one entry of `held`.
void TallyCell(const CopyBlock& block, uint64_t begin, uint64_t end, CopyComparison& out) {
  const uint64_t bytes = (end - begin) * block.width;
  std::vector<std::vector<size_t>> alike;
  for (size_t c = 0; c < block.copies(); ++c) {
    const auto same = std::find_if(alike.begin(), alike.end(), [&](const auto& others) {
      return std::memcmp(block.At(others[0], begin), block.At(c, begin), bytes) == 0;
    });
    if (same == alike.end()) {
      alike.push_back({c});
    } else {
      same->push_back(c);
    }
  }
  if (alike.size() > 1) out.differing += bytes * block.copies();
  for (const std::vector<size_t>& group : alike) {
    Holders holders;
    for (const size_t c : group) {
      holders.push_back(block.files[c][begin]);
      out.stored[holders.back()] += bytes;
    }
    std::sort(holders.begin(), holders.end());
    holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
    CopyTally& tally = out.held[std::move(holders)];
    tally.unique += bytes;
    tally.stored += bytes * group.size();
  }
}

}  // namespace

void CopyComparison::Add(const CopyComparison& other) {
  differing += other.differing;
  for (const auto& [blob, bytes] : other.stored) stored[blob] += bytes;
  for (const auto& [holders, tally] : other.held) {
    held[holders].unique += tally.unique;
    held[holders].stored += tally.stored;
  }
}

uint64_t ElementsAtOnce(const CopiedTensor& tensor) {
  const uint64_t each = kCompareRoom / std::max<size_t>(tensor.copies.size(), 1);
  const uint64_t units = std::max<uint64_t>(each / kCompareUnit, 1);
  return units * UnitElements(tensor);
}

Result<CopyComparison> CompareCopies(const TensorCopies& copies, BlobReader& blobs,
                                     const CopiedTensor& tensor, uint64_t first, uint64_t count) {
  CKPT_RETURN_IF_ERROR(CheckRoom(copies, tensor));
  CopyComparison out;
  CopyBlock block;
  block.width = tensor.width;
  block.bytes.resize(tensor.copies.size());
  block.files.resize(tensor.copies.size());
  const uint64_t at_once = ElementsAtOnce(tensor);
  for (uint64_t done = 0; done < count; done += block.count) {
    block.first = first + done;
    block.count = std::min(at_once, count - done);
    CKPT_RETURN_IF_ERROR(Fill(copies, blobs, tensor, block));
    for (uint64_t begin = 0; begin < block.count;) {
      const uint64_t end = EndOfCell(block, begin, UnitElements(tensor));
      TallyCell(block, begin, end, out);
      begin = end;
    }
  }
  return out;
}

}  // namespace ckptfs
