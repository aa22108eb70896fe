// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/conversion.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kBlock = 1024;  // elements per pass through the stack buffers
constexpr size_t kMaxWidth = 16;

template <size_t width>
void CopyStrided(const std::byte* source, uint64_t source_stride, std::byte* destination,
                 uint64_t destination_stride, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) {
    std::memcpy(destination, source, width);
    source += source_stride * width;
    destination += destination_stride * width;
  }
}

void CopyElements(uint32_t width, const std::byte* source, uint64_t source_stride,
                  std::byte* destination, uint64_t destination_stride, uint64_t elements) {
  if (source_stride == 1 && destination_stride == 1) {
    std::memcpy(destination, source, elements * width);
    return;
  }
  switch (width) {
    case 1: return CopyStrided<1>(source, source_stride, destination, destination_stride, elements);
    case 2: return CopyStrided<2>(source, source_stride, destination, destination_stride, elements);
    case 4: return CopyStrided<4>(source, source_stride, destination, destination_stride, elements);
    case 8: return CopyStrided<8>(source, source_stride, destination, destination_stride, elements);
    default:
      return CopyStrided<16>(source, source_stride, destination, destination_stride, elements);
  }
}

template <class T>
void ScaleBlock(std::byte* values, size_t elements, T factor, bool divide) {
  for (size_t i = 0; i < elements; ++i) {
    T value;
    std::memcpy(&value, values + i * sizeof(T), sizeof(T));
    value = divide ? value / factor : value * factor;
    std::memcpy(values + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

Result<Conversion> Conversion::Make(std::span<const DType> chain, double factor) {
  CKPT_CHECK(!chain.empty() && chain.size() <= kMaxChain);
  Conversion made;
  made.stored_width_ = ByteWidth(chain.front());
  made.shown_width_ = ByteWidth(chain.back());
  DType now = chain.front();
  const auto add = [&](DType to) {
    if (now != to) made.steps_[made.count_++] = Step{FindCast(now, to), ByteWidth(to)};
    now = to;
  };
  if (factor != 1.0) {
    if (!IsFloat(now)) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("values of type ", DTypeName(now), " cannot be scaled"));
    }
    if (now != DType::kF64) add(DType::kF32);
    made.steps_[made.count_++] = Step{nullptr, ByteWidth(now)};
    const double inverse = std::nearbyint(1.0 / factor);
    made.divide_ = std::abs(inverse) > 1 && 1.0 / inverse == factor;
    made.factor_ = made.divide_ ? inverse : factor;
  }
  for (size_t i = 1; i < chain.size(); ++i) {
    if (!CanCast(now, chain[i])) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("no cast from ", DTypeName(now), " to ", DTypeName(chain[i])));
    }
    // A wider type on the way changes nothing.
    if (i + 1 < chain.size() && IsExact(now, chain[i])) continue;
    add(chain[i]);
  }
  return made;
}

void Conversion::Scale(std::byte* values, size_t elements, uint32_t width) const {
  if (width == sizeof(double)) {
    ScaleBlock<double>(values, elements, factor_, divide_);
  } else {
    ScaleBlock<float>(values, elements, static_cast<float>(factor_), divide_);
  }
}

void Conversion::RunBlock(const std::byte* source, std::byte* destination, size_t elements) const {
  alignas(64) std::byte buffers[2][kBlock * sizeof(double)];
  const std::byte* now = source;
  int next = 0;
  for (uint32_t i = 0; i < count_; ++i) {
    const bool last = i + 1 == count_;
    std::byte* to = last ? destination : buffers[next];
    if (steps_[i].cast != nullptr) {
      steps_[i].cast(now, to, elements);
    } else {
      if (now != to) std::memcpy(to, now, elements * steps_[i].width);
      Scale(to, elements, steps_[i].width);
    }
    now = to;
    next ^= 1;
  }
}

void Conversion::Run(const std::byte* source, uint64_t source_stride, std::byte* destination,
                     uint64_t destination_stride, uint64_t elements) const {
  if (count_ == 0) {
    return CopyElements(stored_width_, source, source_stride, destination, destination_stride,
                        elements);
  }
  const bool dense = source_stride == 1 && destination_stride == 1;
  if (dense && count_ == 1 && steps_[0].cast != nullptr) {
    return steps_[0].cast(source, destination, elements);
  }
  alignas(64) std::byte in[kBlock * kMaxWidth];
  alignas(64) std::byte out[kBlock * kMaxWidth];
  for (uint64_t done = 0; done < elements; done += kBlock) {
    const size_t n = std::min<uint64_t>(kBlock, elements - done);
    const std::byte* from = source + done * source_stride * stored_width_;
    std::byte* to = destination + done * destination_stride * shown_width_;
    if (source_stride != 1) CopyElements(stored_width_, from, source_stride, in, 1, n);
    RunBlock(source_stride == 1 ? from : in, destination_stride == 1 ? to : out, n);
    if (destination_stride != 1) CopyElements(shown_width_, out, 1, to, destination_stride, n);
  }
}

}  // namespace ckptfs
