// SPDX-License-Identifier: Apache-2.0

#include "core/view/scaled_atom.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/view/copy_batch.h"
#include "core/view/source_runs.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlock = 8192;  // elements on the stack at a time

template <float (*decode)(uint8_t)>
std::array<float, 256> TableOf() {
  std::array<float, 256> table;
  for (size_t i = 0; i < table.size(); ++i) table[i] = decode(static_cast<uint8_t>(i));
  return table;
}

// Where in a grid of blocks an element of a local tensor lies.
class BlockIndex {
 public:
  BlockIndex(const Shape& values, const ScaleBlock& block)
      : rows_(values[values.size() - 2]),
        columns_(values.back()),
        block_(block),
        grid_rows_(CeilDiv(rows_, block.rows)),
        grid_columns_(CeilDiv(columns_, block.columns)) {}

  // Begins at an element, and goes on in steps of so many.
  void Start(uint64_t flat, uint64_t step) {
    column_ = flat % columns_;
    row_ = flat / columns_ % rows_;
    matrix_ = flat / columns_ / rows_;
    step_columns_ = step % columns_;
    step_rows_ = step / columns_;
  }
  // The steps after which the scale may be another one; at least one.
  uint64_t Same() const {
    if (step_rows_ == 0 && step_columns_ > 0) {
      const uint64_t end = std::min(columns_, (column_ / block_.columns + 1) * block_.columns);
      return CeilDiv(end - column_, step_columns_);
    }
    if (step_rows_ > 0 && step_columns_ == 0) {
      const uint64_t end = std::min(rows_, (row_ / block_.rows + 1) * block_.rows);
      return CeilDiv(end - row_, step_rows_);
    }
    return 1;
  }
  void Advance(uint64_t steps) {
    column_ += steps * step_columns_;
    row_ += steps * step_rows_;
    if (column_ >= columns_) {
      row_ += column_ / columns_;
      column_ %= columns_;
    }
    if (row_ >= rows_) {
      matrix_ += row_ / rows_;
      row_ %= rows_;
    }
  }
  uint64_t scale() const {
    return (matrix_ * grid_rows_ + row_ / block_.rows) * grid_columns_ + column_ / block_.columns;
  }

 private:
  const uint64_t rows_, columns_;
  const ScaleBlock block_;
  const uint64_t grid_rows_, grid_columns_;
  uint64_t matrix_ = 0, row_ = 0, column_ = 0;
  uint64_t step_rows_ = 0, step_columns_ = 0;
};

// The elements of one stretch of a target, as they are stored.
class Stretch {
 public:
  // `fp8`: the values are; else they are fp4.
  Stretch(BlobReader& blobs, const AtomSource& source, bool fp8, const Conversion& bytes,
          const Conversion& words)
      : batch_(blobs), source_(source), fp8_(fp8), bytes_(bytes), words_(words) {
    scale_of_.fill(kNone);
  }

  Status Add(const SourceRun& run, uint64_t begin) {
    if (run.factor != 1.0) {
      return Fail(ErrorCode::kUnsupported, "values with scales per block cannot be scaled again");
    }
    CKPT_RETURN_IF_ERROR(AddValues(run, begin));
    return AddScales(run, begin);
  }

  // The products; 0 where nothing was added.
  Status Multiply(float* out, uint64_t count) {
    CKPT_RETURN_IF_ERROR(batch_.Flush());
    static const auto fp8 = TableOf<DecodeFp8E4M3>();
    static const auto fp4 = TableOf<DecodeFp4>();
    if (scales_ == DType::kF8E8M0) DecodeExponents();
    for (uint64_t i = 0; i < count; ++i) {
      if (scale_of_[i] == kNone) {
        out[i] = 0;
        continue;
      }
      const auto stored = static_cast<uint8_t>(values_[i]);
      const float value = fp8_ ? fp8[stored] : fp4[stored >> shifts_[i] & 15];
      out[i] = value * words_of_[scale_of_[i]];
    }
    return {};
  }

 private:
  static constexpr uint16_t kNone = UINT16_MAX;

  // Bytes with the values, and the half of a byte that is meant.
  Status AddValues(const SourceRun& run, uint64_t begin) {
    const uint64_t first = run.target - begin;
    if (fp8_) {
      return batch_.Add(run.blob, run.offset, run.source_stride, &values_[first], run.target_stride,
                        run.count, bytes_);
    }
    // Two by two steps lead to the same half of another byte.
    const bool odd = run.source_stride % 2 != 0;
    for (uint64_t part = 0; part < (odd ? 2 : 1) && part < run.count; ++part) {
      const uint64_t every = odd ? 2 : 1;
      const uint64_t flat = run.flat + part * run.source_stride;
      const uint64_t to = first + part * run.target_stride;
      const uint64_t stride = every * run.target_stride;
      const uint64_t count = (run.count - part + every - 1) / every;
      for (uint64_t i = 0; i < count; ++i) shifts_[to + i * stride] = flat % 2 == 0 ? 0 : 4;
      // A local tensor begins with a whole byte.
      const uint64_t offset = run.offset - run.flat / 2 + flat / 2;
      CKPT_RETURN_IF_ERROR(batch_.Add(run.blob, offset, every * run.source_stride / 2, &values_[to],
                                      stride, count, bytes_));
    }
    return {};
  }

  // Each scale of the run once, and its number for each element.
  Status AddScales(const SourceRun& run, uint64_t begin) {
    const Fragment scales = source_.gathers[1].series[run.local].At(0);
    scales_ = scales.dtype;
    BlockIndex index(source_.gathers[0].locals[run.local].shape, source_.block);
    index.Start(run.flat, run.source_stride);
    uint64_t last = 0, to = run.target - begin;
    for (uint64_t i = 0; i < run.count;) {
      const uint64_t scale = index.scale();
      if (i == 0 || scale != last) {
        CKPT_RETURN_IF_ERROR(AddScale(scales, scale));
        last = scale;
      }
      const auto number = static_cast<uint16_t>(scale_count_ + pending_ - 1);
      const uint64_t same = std::min(index.Same(), run.count - i);
      for (uint64_t k = 0; k < same; ++k, to += run.target_stride) scale_of_[to] = number;
      index.Advance(same);
      i += same;
    }
    return AddPending(scales);
  }

  // Scales at one distance from each other are copied together.
  Status AddScale(const Fragment& scales, uint64_t scale) {
    if (pending_ == 1 && scale > pending_last_) pending_step_ = scale - pending_last_;
    const bool follows =
        pending_ > 0 && scale > pending_last_ && scale - pending_last_ == pending_step_;
    if (pending_ > 0 && !follows) CKPT_RETURN_IF_ERROR(AddPending(scales));
    if (pending_ == 0) pending_first_ = scale;
    pending_last_ = scale;
    ++pending_;
    return {};
  }

  Status AddPending(const Fragment& scales) {
    if (pending_ == 0) return {};
    const bool word = scales.dtype != DType::kF8E8M0;
    const uint64_t width = ByteWidth(scales.dtype);
    std::byte* to =
        word ? reinterpret_cast<std::byte*>(&words_of_[scale_count_]) : &bytes_of_[scale_count_];
    CKPT_RETURN_IF_ERROR(batch_.Add(scales.blob, scales.offset + pending_first_ * width,
                                    pending_ == 1 ? 1 : pending_step_, to, 1, pending_,
                                    word ? words_ : bytes_));
    scale_count_ += pending_;
    pending_ = 0;
    return {};
  }

  void DecodeExponents() {
    static const auto exponents = TableOf<DecodeFp8E8M0>();
    for (uint64_t i = 0; i < scale_count_; ++i) {
      words_of_[i] = exponents[static_cast<uint8_t>(bytes_of_[i])];
    }
  }

  CopyBatch batch_;
  const AtomSource& source_;
  const bool fp8_;
  const Conversion& bytes_;  // of values, and of scales that are exponents
  const Conversion& words_;  // of other scales to fp32
  DType scales_ = DType::kF32;
  std::array<std::byte, kBlock> values_;
  std::array<uint8_t, kBlock> shifts_;     // of fp4
  std::array<uint16_t, kBlock> scale_of_;  // kNone: no element
  // No more scales than elements.
  alignas(64) std::array<float, kBlock> words_of_;
  std::array<std::byte, kBlock> bytes_of_;
  uint64_t scale_count_ = 0;
  uint64_t pending_ = 0, pending_first_ = 0, pending_last_ = 0, pending_step_ = 0;
};

// All values, and all scales, of a source are of one type.
Result<DType> TypeOf(const Gather& gather) {
  if (gather.series.empty()) return Fail(ErrorCode::kInvalid, "no fragments");
  const DType first = gather.series.front().dtype;
  for (const FragmentSeries& series : gather.series) {
    if (series.dtype == first) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat("values with scales per block, of types ", DTypeName(first), " and ",
                       DTypeName(series.dtype)));
  }
  return first;
}

}  // namespace

float DecodeFp8E4M3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) {
    return std::copysign(std::numeric_limits<float>::quiet_NaN(), bits >> 7 != 0 ? -1.0F : 1.0F);
  }
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits >> 7 != 0 ? -value : value;
}

float DecodeFp8E8M0(uint8_t bits) {
  if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0F, int{bits} - 127);
}

float DecodeFp4(uint8_t bits) {
  constexpr float kValues[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const float value = kValues[bits & 7];
  return (bits & 8) != 0 ? -value : value;
}

Status ReadScaled(BlobReader& blobs, const StoredAtom& stored, const LocalTensor& local,
                  uint64_t begin, uint64_t end, std::byte* out, uint32_t shown_width) {
  const AtomSource& source = stored.atom->source;
  CKPT_ASSIGN_OR_RETURN(const DType values, TypeOf(source.gathers[0]));
  CKPT_ASSIGN_OR_RETURN(const DType scales, TypeOf(source.gathers[1]));
  const DType same[] = {DType::kU8}, to_float[] = {scales, DType::kF32};
  CKPT_ASSIGN_OR_RETURN(const Conversion bytes, Conversion::Make(same));
  CKPT_ASSIGN_OR_RETURN(const Conversion words, scales == DType::kF8E8M0
                                                    ? Conversion::Make(same)
                                                    : Conversion::Make(to_float));
  CKPT_ASSIGN_OR_RETURN(const Conversion shown, stored.MakeConversion(DType::kF32, 1.0));
  for (uint64_t from = begin; from < end; from += kBlock) {
    const uint64_t to = std::min(from + kBlock, end);
    Stretch stretch(blobs, source, values != DType::kF4, bytes, words);
    Status failed;
    const RunsEnd how =
        ForEachSourceRun(source.gathers[0], local, from, to, [&](const SourceRun& run) {
          failed = stretch.Add(run, from);
          return failed.has_value();
        });
    CKPT_RETURN_IF_ERROR(failed);
    if (how == RunsEnd::kHole) {
      return Fail(ErrorCode::kDataLoss, "the requested elements are not stored anywhere");
    }
    alignas(64) std::array<float, kBlock> products;
    CKPT_RETURN_IF_ERROR(stretch.Multiply(products.data(), to - from));
    shown.Run(reinterpret_cast<const std::byte*>(products.data()), 1,
              out + (from - begin) * shown_width, 1, to - from);
  }
  return {};
}

}  // namespace ckptfs
