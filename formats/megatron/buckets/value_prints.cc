// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/value_prints.h"

#include <algorithm>
#include <span>
#include <utility>

#include "core/base/parallel.h"
#include "core/tensor/cast.h"
#include "formats/settle/comparable_floats.h"

namespace ckptfs::megatron {
namespace {

constexpr uint64_t kBlocks = 16;
constexpr uint64_t kBlock = kSampleElements / kBlocks;
constexpr uint64_t kWindow = uint64_t{1} << 22;  // elements of a whole tensor that are read at once
constexpr uint64_t kBatchBytes = uint64_t{1} << 25;  // of samples that are read at once

struct Block {
  uint64_t begin = 0;
  uint64_t end = 0;
};

std::vector<Block> BlocksOf(uint64_t elements) {
  if (elements <= kSampleElements) return {{0, elements}};
  std::vector<Block> out;
  for (uint64_t b = 0; b < kBlocks; ++b) {
    const uint64_t begin = (elements - kBlock) / (kBlocks - 1) * b;
    out.push_back(b + 1 == kBlocks ? Block{elements - kBlock, elements}
                                   : Block{begin, begin + kBlock});
  }
  return out;
}

uint64_t BytesOf(const std::vector<Block>& blocks, DType dtype) {
  uint64_t elements = 0;
  for (const Block& block : blocks) elements += block.end - block.begin;
  return elements * ByteWidth(dtype);
}

// Adds the ranges of ascending blocks, which fill `out` one after the other.
void AddRanges(const FlatTensor& tensor, const std::vector<Block>& blocks, std::byte* out,
               std::vector<dcp::StoredState::FileRange>& ranges) {
  const uint64_t width = ByteWidth(tensor.dtype);
  size_t run = 0;
  uint64_t first = 0;  // element of the tensor that the run begins with
  for (const Block& block : blocks) {
    for (uint64_t at = block.begin; at < block.end;) {
      while (at >= first + tensor.runs[run].elements) first += tensor.runs[run++].elements;
      const uint64_t end = std::min(block.end, first + tensor.runs[run].elements);
      const uint64_t bytes = (end - at) * width;
      ranges.push_back({tensor.runs[run].file, tensor.runs[run].offset + (at - first) * width,
                        std::span(out, bytes)});
      out += bytes;
      at = end;
    }
  }
}

std::vector<std::byte> Cast(DType from, DType to, std::vector<std::byte> bytes) {
  const CastFunction cast = from == to ? nullptr : FindCast(from, to);
  if (cast == nullptr) return bytes;
  const size_t elements = bytes.size() / ByteWidth(from);
  std::vector<std::byte> out(elements * ByteWidth(to));
  cast(bytes.data(), out.data(), elements);
  return out;
}

// Adds elements as the fp32 values that they are as weights.
void AddValues(DigestStream& digest, DType from, DType as, std::vector<std::byte> bytes) {
  std::vector<std::byte> floats = Cast(as, DType::kF32, Cast(from, as, std::move(bytes)));
  MakeComparable(floats);
  digest.Add(floats);
}

Result<Digest> PrintOfAll(const dcp::StoredState& state, const FlatTensor& tensor, DType as) {
  DigestStream digest;
  const uint64_t elements = tensor.Elements();
  for (uint64_t begin = 0; begin < elements; begin += kWindow) {
    const std::vector<Block> block = {{begin, std::min(elements, begin + kWindow)}};
    std::vector<std::byte> bytes(BytesOf(block, tensor.dtype));
    std::vector<dcp::StoredState::FileRange> ranges;
    AddRanges(tensor, block, bytes.data(), ranges);
    CKPT_RETURN_IF_ERROR(state.ReadRanges(std::move(ranges)));
    AddValues(digest, tensor.dtype, as, std::move(bytes));
  }
  return digest.Finish();
}

}  // namespace

uint64_t FlatTensor::Elements() const {
  uint64_t elements = 0;
  for (const Run& run : runs) elements += run.elements;
  return elements;
}

bool CanPrint(DType from, DType as) { return IsFloat(from) && IsFloat(as); }

Result<std::vector<Digest>> PrintsOf(const dcp::StoredState& state, size_t count,
                                     const std::function<FlatTensor(size_t)>& make, DType as,
                                     PrintOf what) {
  std::vector<Digest> out(count);
  if (what == PrintOf::kAll) {
    for (size_t i = 0; i < count; ++i) {
      CKPT_ASSIGN_OR_RETURN(out[i], PrintOfAll(state, make(i), as));
    }
    return out;
  }
  for (size_t first = 0; first < count;) {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<DType> dtypes;
    std::vector<dcp::StoredState::FileRange> ranges;
    for (uint64_t sum = 0; sum < kBatchBytes && first + bytes.size() < count;) {
      const FlatTensor tensor = make(first + bytes.size());
      const std::vector<Block> blocks = BlocksOf(tensor.Elements());
      bytes.emplace_back(BytesOf(blocks, tensor.dtype));
      dtypes.push_back(tensor.dtype);
      AddRanges(tensor, blocks, bytes.back().data(), ranges);
      sum += bytes.back().size() + 1;
    }
    CKPT_RETURN_IF_ERROR(state.ReadRanges(std::move(ranges)));
    ParallelFor(bytes.size(), [&](size_t i) {
      DigestStream digest;
      AddValues(digest, dtypes[i], as, std::move(bytes[i]));
      out[first + i] = digest.Finish();
    });
    first += bytes.size();
  }
  return out;
}

}  // namespace ckptfs::megatron
