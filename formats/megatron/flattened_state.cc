// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/flattened_state.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::megatron {

bool IsFlattened(const Shape& stored, const Shape& of) {
  if (of.empty() || stored.size() != of.size() + 1) return false;
  uint64_t volume = 1;
  for (size_t d = 0; d < of.size(); ++d) {
    if (stored[d] == 0 || of[d] == 0 || of[d] % stored[d] != 0) return false;
    volume *= of[d] / stored[d];
  }
  return volume == stored.back();
}

Result<std::shared_ptr<const FlattenedState>> FlattenedState::Make(const dcp::StoredState& state,
                                                                   size_t tensor, const Shape& of) {
  const dcp::TensorEntry& entry = state.metadata().tensors[tensor];
  Shape box(of.size());
  for (size_t d = 0; d < of.size(); ++d) box[d] = of[d] / entry.shape[d];
  std::shared_ptr<FlattenedState> out(new FlattenedState(state, tensor, std::move(box)));
  for (size_t i = 0; i < entry.chunk_count; ++i) {
    const auto sizes = state.metadata().SizesOf(entry, i);
    if (std::ranges::find(sizes, 0u) != sizes.end()) continue;
    const auto counts = sizes.first(of.size());
    if (!std::ranges::all_of(counts, [](uint64_t size) { return size == 1; }) ||
        !state.DensePlaceOf(tensor, i)) {
      return Fail(ErrorCode::kUnsupported, "a chunk of it is not a range of one rank's elements");
    }
    out->chunks_.push_back(i);
  }
  std::ranges::sort(out->chunks_, [&](size_t one, size_t other) {
    return std::ranges::lexicographical_compare(state.metadata().OffsetsOf(entry, one),
                                                state.metadata().OffsetsOf(entry, other));
  });
  return std::shared_ptr<const FlattenedState>(std::move(out));
}

Status FlattenedState::Place(int64_t layer, Assembler& assembler, AtomIndex atom) const {
  const dcp::DcpMetadata& metadata = state_.metadata();
  const dcp::TensorEntry& entry = metadata.tensors[tensor_];
  const size_t skip = layer < 0 ? 0 : 1;
  const auto first = [&](size_t chunk) { return metadata.OffsetsOf(entry, chunk)[0]; };
  std::span<const size_t> chunks = chunks_;
  if (layer >= 0) {
    const auto of = std::ranges::equal_range(chunks, static_cast<uint64_t>(layer), {}, first);
    chunks = {of.begin(), of.end()};
  }
  const Shape box(box_.begin() + static_cast<ptrdiff_t>(skip), box_.end());
  std::optional<std::vector<uint64_t>> last;
  uint32_t local = 0;
  for (const size_t chunk : chunks) {
    const auto offsets = metadata.OffsetsOf(entry, chunk);
    std::vector<uint64_t> begin;
    for (size_t d = skip; d < box_.size(); ++d) begin.push_back(offsets[d] * box_[d]);
    if (last != begin) {
      LocalTensor whole{box, {{box, begin, 0, RowMajorStrides(box), 1.0}}};
      local = assembler.AddLocal(atom, 0, std::move(whole));
      last = std::move(begin);
    }
    const auto place = state_.DensePlaceOf(tensor_, chunk);
    const uint64_t from = offsets.back();
    assembler.AddFragment(atom, 0, local,
                          {from, from + metadata.SizesOf(entry, chunk).back(), place->blob,
                           place->first_byte, entry.dtype});
  }
  return {};
}

}  // namespace ckptfs::megatron
