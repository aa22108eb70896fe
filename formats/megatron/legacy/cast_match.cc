// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/cast_match.h"

#include <algorithm>
#include <span>
#include <string>

#include "core/tensor/cast.h"
#include "formats/settle/comparable_floats.h"

namespace ckptfs::megatron {
namespace {

constexpr uint64_t kBlocks = 16;
constexpr uint64_t kBlock = 256;

// Elements as another type; those of the same as they are.  REQUIRES: there is such a cast.
std::string Cast(DType from, DType to, std::string bytes) {
  if (from == to) return bytes;
  const uint64_t elements = bytes.size() / ByteWidth(from);
  std::string out(elements * ByteWidth(to), '\0');
  FindCast(from, to)(std::as_bytes(std::span(bytes)).data(),
                     std::as_writable_bytes(std::span(out)).data(), elements);
  return out;
}

// As fp32, once they are of the weight's type.
std::string Comparable(DType from, DType as, std::string bytes) {
  std::string floats = Cast(as, DType::kF32, Cast(from, as, std::move(bytes)));
  MakeComparable(std::as_writable_bytes(std::span(floats)));
  return floats;
}

}  // namespace

Result<bool> MayBeCast(TensorIn master, uint64_t at, TensorIn weight) {
  const DType from = master.tensor->dtype();
  const DType as = weight.tensor->dtype();
  const uint64_t elements = weight.tensor->elements();
  const uint64_t there = master.tensor->elements();
  if (at > there || elements > there - at || !master.tensor->dense()) return false;
  if (!IsFloat(from) || !IsFloat(as) || !CanCast(from, as) || !CanCast(as, DType::kF32)) {
    return false;
  }
  const uint64_t blocks = std::min(kBlocks, (elements + kBlock - 1) / kBlock);
  for (uint64_t b = 0; b < blocks; ++b) {
    const uint64_t begin =
        elements <= kBlocks * kBlock ? b * kBlock : (elements - kBlock) / (kBlocks - 1) * b;
    const uint64_t end = b + 1 == blocks ? elements : std::min(elements, begin + kBlock);
    const uint64_t from_last =
        b + 1 == blocks && elements > kBlocks * kBlock ? end - kBlock : begin;
    CKPT_ASSIGN_OR_RETURN(std::string masters,
                          master.file->Read(*master.tensor, at + from_last, at + end));
    CKPT_ASSIGN_OR_RETURN(std::string weights, weight.file->Read(*weight.tensor, from_last, end));
    if (Comparable(from, as, std::move(masters)) != Comparable(as, as, std::move(weights))) {
      return false;
    }
  }
  return true;
}

}  // namespace ckptfs::megatron
