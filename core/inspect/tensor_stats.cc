// SPDX-License-Identifier: Apache-2.0

#include "core/inspect/tensor_stats.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/inspect/atom_blocks.h"

namespace ckptfs {
namespace {

constexpr size_t kRun = 4096;  // elements decoded at a time

template <class V>
TensorStats StatsOfNumbers(std::span<const V> numbers) {
  TensorStats stats;
  stats.numbers = true;
  stats.elements = numbers.size();
  V least = 0, most = 0;
  WideNumber sum = 0;
  for (const V value : numbers) {
    if (std::isnan(value)) {
      ++stats.nan;
    } else if (std::isinf(value)) {
      ++stats.infinite;
    } else {
      if (stats.finite == 0 || value < least) least = value;
      if (stats.finite == 0 || value > most) most = value;
      if (value == 0) ++stats.zeros;
      ++stats.finite;
      sum += value;
    }
  }
  if (stats.finite == 0) return stats;
  stats.min = least;
  stats.max = most;
  stats.mean = sum / static_cast<WideNumber>(stats.finite);
  for (const V value : numbers) {
    if (!std::isfinite(value)) continue;
    const WideNumber away = static_cast<WideNumber>(value) - stats.mean;
    stats.squares += away * away;
  }
  return stats;
}

template <class V>
TensorStats StatsOfBytes(DType dtype, std::span<const std::byte> bytes) {
  const uint32_t width = ByteWidth(dtype);
  std::vector<V> numbers(std::min<size_t>(kRun, bytes.size() / width));
  TensorStats all;
  all.numbers = true;
  for (size_t at = 0; at < bytes.size();) {
    const size_t count = std::min(numbers.size(), (bytes.size() - at) / width);
    const std::span<V> run = std::span(numbers).first(count);
    DecodeNumbers(dtype, bytes.subspan(at, count * width), run);
    all.Append(StatsOfNumbers(std::span<const V>(run)));
    at += count * width;
  }
  return all;
}

struct Block {
  size_t atom = 0;  // into what was asked for
  uint64_t first = 0;
  uint64_t elements = 0;
};

// The blocks of one atom, if it has numbers.
Status AddBlocks(const Atom& atom, size_t number, std::vector<Block>& blocks, uint64_t& bytes) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  if (!HasNumbers(atom.dtype)) return {};
  const uint64_t each = AtomBlocks::kBlockBytes / ByteWidth(atom.dtype);
  for (uint64_t first = 0; first < elements; first += each) {
    blocks.push_back({number, first, std::min(each, elements - first)});
  }
  bytes += elements * ByteWidth(atom.dtype);
  return {};
}

}  // namespace

WideNumber TensorStats::Std() const {
  return finite == 0 ? 0 : std::sqrt(squares / static_cast<WideNumber>(finite));
}

void TensorStats::Append(const TensorStats& other) {
  if (other.finite > 0 && finite > 0) {
    const auto n = static_cast<WideNumber>(finite), m = static_cast<WideNumber>(other.finite);
    const WideNumber apart = other.mean - mean;
    squares += other.squares + apart * apart * n * m / (n + m);
    mean += apart * m / (n + m);
    min = std::min(min, other.min);
    max = std::max(max, other.max);
  } else if (other.finite > 0) {
    min = other.min;
    max = other.max;
    mean = other.mean;
    squares = other.squares;
  }
  elements += other.elements;
  finite += other.finite;
  zeros += other.zeros;
  nan += other.nan;
  infinite += other.infinite;
}

TensorStats StatsOf(DType dtype, std::span<const std::byte> bytes) {
  return NeedsWide(dtype) ? StatsOfBytes<WideNumber>(dtype, bytes)
                          : StatsOfBytes<double>(dtype, bytes);
}

Result<std::vector<TensorStats>> StatsOfAtoms(const StepModel& model, BlobReader& blobs,
                                              std::span<const AtomIndex> atoms,
                                              const JobOptions& options) {
  std::vector<TensorStats> all(atoms.size());
  std::vector<Block> blocks;
  uint64_t bytes = 0;
  for (size_t i = 0; i < atoms.size(); ++i) {
    const Atom& atom = model.atom(atoms[i]);
    all[i].numbers = HasNumbers(atom.dtype);
    CKPT_RETURN_IF_ERROR(AddBlocks(atom, i, blocks, bytes));
    if (!all[i].numbers) all[i].elements = ElementCount(atom.shape).value_or(0);
  }
  std::vector<TensorStats> parts(blocks.size());
  const auto work = [&](size_t i) -> Result<uint64_t> {
    const Block& block = blocks[i];
    const Atom& atom = model.atom(atoms[block.atom]);
    CKPT_ASSIGN_OR_RETURN(const AtomBlocks reader,
                          AtomBlocks::Open(model, blobs, atoms[block.atom]));
    std::vector<std::byte> buffer(block.elements * reader.width());
    const Status read = reader.Read(block.first, buffer);
    if (!read) {
      return Fail(Error(read.error()).WithContext(model.parameter(atom.parameter).name));
    }
    parts[i] = StatsOf(atom.dtype, buffer);
    return buffer.size();
  };
  CKPT_RETURN_IF_ERROR(RunWorkList(blocks.size(), bytes, options, work));
  CKPT_RETURN_IF_ERROR(blobs.CheckOpen());
  for (size_t i = 0; i < blocks.size(); ++i) all[blocks[i].atom].Append(parts[i]);
  return all;
}

}  // namespace ckptfs
