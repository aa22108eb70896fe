// SPDX-License-Identifier: Apache-2.0

#include "core/check/weight_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <tuple>

#include "core/base/strings.h"
#include "core/check/scattered_read.h"
#include "core/tensor/cast.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxSamples = 8192;
constexpr uint64_t kSampleElements = 128;
constexpr unsigned kThreads = 32;  // files read at a time

// How a floating type lies in its bits.
struct FloatBits {
  uint64_t sign;
  uint64_t exponent;       // mask
  bool flushes_subnormal;  // fp32's range: where processors do
};

FloatBits BitsOf(DType dtype) {
  switch (dtype) {
    case DType::kF16: return {0x8000, 0x7c00, false};
    case DType::kBF16: return {0x8000, 0x7f80, true};
    case DType::kF32: return {0x80000000, 0x7f800000, true};
    default: return {uint64_t{1} << 63, 0x7ff0000000000000, false};
  }
}

bool SameValue(const FloatBits& bits, uint64_t a, uint64_t b) {
  if (a == b) return true;
  const uint64_t left = a & ~bits.sign;
  const uint64_t right = b & ~bits.sign;
  if (left > bits.exponent && right > bits.exponent) return true;  // NaN
  if (left == 0 && right == 0) return true;
  return bits.flushes_subnormal && (left & bits.exponent) == 0 && (right & bits.exponent) == 0;
}

template <class Word>
Difference Compare(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  const FloatBits bits = BitsOf(dtype);
  Difference found;
  for (size_t i = 0; i < a.size() / sizeof(Word); ++i) {
    Word left, right;
    std::memcpy(&left, a.data() + i * sizeof(Word), sizeof(Word));
    std::memcpy(&right, b.data() + i * sizeof(Word), sizeof(Word));
    if (SameValue(bits, left, right)) continue;
    if (found.count++ == 0) found.first = i;
  }
  return found;
}

// True if an atom's bytes are in the step's files as they are.
bool IsStored(const Atom& atom) {
  return IsStoredInFiles(atom.source) && !atom.source.gathers.empty();
}

// ---- sampling ----------------------------------------------------------------

// A run of a local tensor that lies in one file of masters.
struct Run {
  WeightPair pair;
  uint32_t copy = 0;
  uint32_t local = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint32_t blob = 0;
};

// Where elements [begin, end) of a local tensor lie in its weights' file.
struct Stored {
  uint32_t blob = 0;
  uint64_t offset = 0;
  uint64_t end = 0;  // of the elements there from `begin` on
};

std::optional<Stored> FindStored(const Gather& gather, uint32_t local, uint64_t begin,
                                 uint64_t end) {
  for (const FragmentSeries& series : gather.series) {
    if (series.local != local || begin < series.flat_begin) continue;
    const uint64_t k = series.flat_step == 0 ? 0 : (begin - series.flat_begin) / series.flat_step;
    if (k >= series.count) continue;
    const Fragment fragment = series.At(static_cast<uint32_t>(k));
    if (begin >= fragment.flat_end) continue;
    const uint64_t offset =
        fragment.offset + (begin - fragment.flat_begin) * ByteWidth(fragment.dtype);
    return Stored{static_cast<uint32_t>(fragment.blob), offset, std::min(end, fragment.flat_end)};
  }
  return std::nullopt;
}

// Every run of the pair's masters whose local tensor the weight has, too.
void AddRuns(const StepModel& model, const WeightPair& pair, std::vector<Run>& runs) {
  for (uint32_t copy = 0; copy < pair.copies; ++copy) {
    const Gather& weight = model.atom(pair.weight).source.gathers[copy];
    const Gather& master = model.atom(pair.master).source.gathers[copy];
    for (const FragmentSeries& series : master.series) {
      const bool same = series.local < weight.locals.size() &&
                        weight.locals[series.local] == master.locals[series.local];
      for (uint32_t k = 0; same && k < series.count; ++k) {
        const Fragment fragment = series.At(k);
        runs.push_back(Run{pair, copy, series.local, fragment.flat_begin, fragment.flat_end,
                           static_cast<uint32_t>(fragment.blob)});
      }
    }
  }
}

// The runs to sample: the longest of every file, the longest of every weight on
// every rank, then others, as many as are sampled.
std::vector<Run> ChooseRuns(const StepModel& model, const WeightPairs& pairs) {
  std::vector<Run> all;
  for (const WeightPair& pair : pairs.compared) AddRuns(model, pair, all);
  std::stable_sort(all.begin(), all.end(),
                   [](const Run& a, const Run& b) { return a.end - a.begin > b.end - b.begin; });
  std::set<uint32_t> files;
  std::set<std::tuple<AtomIndex, uint32_t, uint32_t>> weights;
  std::vector<Run> chosen[3];
  for (const Run& run : all) {
    const bool of_file = files.insert(run.blob).second;
    const bool of_weight = weights.insert({run.pair.weight, run.copy, run.local}).second;
    chosen[of_file ? 0 : of_weight ? 1 : 2].push_back(run);
  }
  std::vector<Run> out = std::move(chosen[0]);
  for (const auto& more : {chosen[1], chosen[2]}) out.insert(out.end(), more.begin(), more.end());
  out.resize(std::min(out.size(), kMaxSamples));
  return out;
}

// Elements of one weight and of its master, and where they are in the buffer.
struct Sample {
  const Run* run = nullptr;
  uint64_t begin = 0;  // of the local tensor
  uint64_t count = 0;
  Stored weight;
  Stored master;
  uint64_t weight_at = 0;
  uint64_t master_at = 0;
};

// From the middle of the run.
std::optional<Sample> MakeSample(const StepModel& model, const Run& run, uint64_t& bytes,
                                 std::vector<ScatteredPiece>& pieces) {
  const Atom& weight = model.atom(run.pair.weight);
  const Atom& master = model.atom(run.pair.master);
  const uint64_t length = run.end - run.begin;
  Sample sample;
  sample.run = &run;
  sample.begin = run.begin + (length - std::min(length, kSampleElements)) / 2;
  const uint64_t end = std::min(run.end, sample.begin + kSampleElements);
  const auto in_weight = FindStored(weight.source.gathers[run.copy], run.local, sample.begin, end);
  const auto in_master = FindStored(master.source.gathers[run.copy], run.local, sample.begin, end);
  if (!in_weight || !in_master) return std::nullopt;
  sample.weight = *in_weight;
  sample.master = *in_master;
  sample.count = std::min(in_weight->end, in_master->end) - sample.begin;
  const auto add = [&](const Stored& stored, DType dtype) {
    const uint64_t size = sample.count * ByteWidth(dtype);
    pieces.push_back(
        ScatteredPiece{stored.blob, static_cast<uint32_t>(size), stored.offset, bytes});
    bytes += size;
    return bytes - size;
  };
  sample.weight_at = add(sample.weight, weight.dtype);
  sample.master_at = add(sample.master, master.dtype);
  return sample;
}

std::string PathOf(const StepModel& model, uint32_t blob) {
  return model.PathOf(model.blobs[blob]);
}

// kDataLoss if an element of the sample is not its master cast.
Status CompareSample(const StepModel& model, const Sample& sample, const std::string& buffer) {
  const Atom& weight = model.atom(sample.run->pair.weight);
  const Atom& master = model.atom(sample.run->pair.master);
  const auto at = [&](uint64_t begin, DType dtype) {
    return std::as_bytes(std::span(buffer)).subspan(begin, sample.count * ByteWidth(dtype));
  };
  const uint32_t width = ByteWidth(weight.dtype);
  std::vector<std::byte> cast(sample.count * width);
  if (weight.dtype == master.dtype) {
    std::memcpy(cast.data(), buffer.data() + sample.master_at, cast.size());
  } else {
    FindCast(master.dtype, weight.dtype)(at(sample.master_at, master.dtype).data(), cast.data(),
                                         sample.count);
  }
  const std::span<const std::byte> stored = at(sample.weight_at, weight.dtype);
  const LocalTensor& local = weight.source.gathers[sample.run->copy].locals[sample.run->local];
  // Padding may hold anything: what differs in it is passed over.
  for (uint64_t i = 0; i < sample.count; ++i) {
    const auto one = [&](std::span<const std::byte> of) { return of.subspan(i * width, width); };
    if (FindDifference(weight.dtype, one(stored), one(cast)).count == 0) continue;
    const auto element = AtomElement(local, weight.shape, sample.begin + i);
    if (!element) continue;
    return Fail(ErrorCode::kDataLoss,
                StrCat("parameter '", model.parameter(weight.parameter).name, "': element ",
                       *element, " is ", ElementText(weight.dtype, one(stored)), " in ",
                       PathOf(model, sample.weight.blob), ", but its master, cast to ",
                       DTypeName(weight.dtype), ", is ", ElementText(weight.dtype, one(cast)),
                       " in ", PathOf(model, sample.master.blob)));
  }
  return {};
}

}  // namespace

bool CanCompare(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 ||
         dtype == DType::kF64;
}

Difference FindDifference(DType dtype, std::span<const std::byte> a, std::span<const std::byte> b) {
  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return {};
  switch (ByteWidth(dtype)) {
    case 2: return Compare<uint16_t>(dtype, a, b);
    case 4: return Compare<uint32_t>(dtype, a, b);
    default: return Compare<uint64_t>(dtype, a, b);
  }
}

std::string ElementText(DType dtype, std::span<const std::byte> element) {
  double value = 0;
  if (dtype == DType::kF64) {
    std::memcpy(&value, element.data(), sizeof(value));
  } else {
    FindCast(dtype, DType::kF64)(element.data(), reinterpret_cast<std::byte*>(&value), 1);
  }
  return fmt::format("{:.9g}", value);
}

std::optional<uint64_t> AtomElement(const LocalTensor& local, const Shape& atom, uint64_t flat) {
  const std::vector<uint64_t> atom_strides = RowMajorStrides(atom);
  for (const Piece& piece : local.pieces) {
    if (flat < piece.local_offset) continue;
    uint64_t rest = flat - piece.local_offset;
    uint64_t element = 0;
    bool inside = std::find(piece.shape.begin(), piece.shape.end(), 0) == piece.shape.end();
    std::vector<size_t> dims(piece.shape.size());
    std::iota(dims.begin(), dims.end(), 0);
    std::stable_sort(dims.begin(), dims.end(), [&](size_t a, size_t b) {
      return piece.local_strides[a] > piece.local_strides[b];
    });
    for (const size_t d : dims) {
      const uint64_t stride = std::max<uint64_t>(1, piece.local_strides[d]);
      const uint64_t index = std::min(rest / stride, piece.shape[d] - 1);
      rest -= index * stride;
      element += (piece.atom_begin[d] + index) * atom_strides[d];
    }
    if (inside && rest == 0) return element;
  }
  return std::nullopt;
}

WeightPairs FindWeightPairs(const StepModel& model) {
  WeightPairs pairs;
  for (uint32_t i = 0; i < model.atoms.size(); ++i) {
    const Atom& weight = model.atoms[i];
    if (weight.kind != "weight" || !IsStored(weight) || !CanCompare(weight.dtype)) continue;
    const auto found = model.FindAtom(weight.parameter, "master");
    if (!found) continue;
    const Atom& master = model.atom(*found);
    if (!IsStored(master) || !CanCompare(master.dtype) || master.shape != weight.shape) continue;
    const size_t copies = weight.source.gathers.size();
    const bool paired = copies == master.source.gathers.size();
    const bool averaged = IsAveraged(weight.source) || IsAveraged(master.source);
    if (model.weights_apart || (averaged && !paired)) {
      pairs.skipped.push_back(AtomIndex{i});
    } else {
      pairs.compared.push_back(
          WeightPair{AtomIndex{i}, *found, paired ? static_cast<uint32_t>(copies) : 1});
    }
  }
  return pairs;
}

Result<uint64_t> CheckWeightSample(const StepModel& model, BlobReader& blobs) {
  const std::vector<Run> runs = ChooseRuns(model, FindWeightPairs(model));
  std::vector<Sample> samples;
  std::vector<ScatteredPiece> pieces;
  uint64_t bytes = 0;
  for (const Run& run : runs) {
    if (auto sample = MakeSample(model, run, bytes, pieces)) samples.push_back(*sample);
  }
  std::string buffer(bytes, '\0');
  CKPT_RETURN_IF_ERROR(ReadScattered(blobs, pieces, kThreads, buffer.data()));
  uint64_t compared = 0;
  for (const Sample& sample : samples) {
    CKPT_RETURN_IF_ERROR(CompareSample(model, sample, buffer));
    compared += sample.count;
  }
  return compared;
}

}  // namespace ckptfs
