// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/master_prints.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "core/base/digest.h"
#include "core/tensor/cast.h"
#include "formats/settle/comparable_floats.h"

namespace ckptfs::deepspeed::native {
namespace {

constexpr uint64_t kBlocks = 16;
constexpr uint64_t kBlock = 256;  // elements

// Elements of a type as fp32; nothing if they cannot be cast.
std::optional<std::string> Cast(DType from, DType to, const std::string& bytes, uint64_t elements) {
  if (from == to) return bytes;
  const CastFunction cast = FindCast(from, to);
  if (cast == nullptr) return std::nullopt;
  std::string out(elements * ByteWidth(to), '\0');
  cast(std::as_bytes(std::span(bytes)).data(), std::as_writable_bytes(std::span(out)).data(),
       elements);
  return out;
}

// Returns the print of a tensor as a weight of type `as`; nothing if it cannot be compared.
Result<std::optional<std::string>> PrintOf(const TorchFile& file, const FileTensor& tensor,
                                           DType as) {
  using Print = std::optional<std::string>;
  if (!tensor.dense() || !IsFloat(as) || !IsFloat(tensor.dtype())) return Print();
  const uint64_t elements = tensor.elements();
  const uint64_t blocks = std::min(kBlocks, (elements + kBlock - 1) / kBlock);
  DigestStream digest;
  for (uint64_t b = 0; b < blocks; ++b) {
    const uint64_t begin =
        elements <= kBlocks * kBlock ? b * kBlock : (elements - kBlock) / (kBlocks - 1) * b;
    const uint64_t end = std::min(elements, begin + kBlock);
    CKPT_ASSIGN_OR_RETURN(const std::string bytes, file.Read(tensor, begin, end));
    const auto cast = Cast(tensor.dtype(), as, bytes, end - begin);
    auto floats = cast ? Cast(as, DType::kF32, *cast, end - begin) : cast;
    if (!floats) return Print();
    MakeComparable(std::as_writable_bytes(std::span(*floats)));
    digest.Add(std::as_bytes(std::span(*floats)));
  }
  return Print(digest.Finish().Hex());
}

}  // namespace

Result<MasterPrints> PrintsOf(const TorchFile& file, const UnshardedOptimizer& optimizer,
                              std::span<const FileTensor* const> weights) {
  MasterPrints out;
  std::optional<DType> as;  // of all weights: DeepSpeed makes them one type
  bool one = true;
  for (const FileTensor* weight : weights) {
    one = one && as.value_or(weight->dtype()) == weight->dtype();
    as = weight->dtype();
  }
  for (const FileTensor* weight : weights) {
    CKPT_ASSIGN_OR_RETURN(auto print, PrintOf(file, *weight, weight->dtype()));
    out.parameters.push_back(one ? std::move(print) : std::nullopt);
  }
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    out.members.emplace_back(optimizer.groups[g].members.size());
    if (!as || !one || g >= optimizer.parameter_masters.size()) continue;
    const auto& masters = optimizer.parameter_masters[g];
    for (size_t i = 0; i < masters.size() && i < out.members[g].size(); ++i) {
      CKPT_ASSIGN_OR_RETURN(out.members[g][i], PrintOf(file, masters[i], *as));
    }
  }
  return out;
}

}  // namespace ckptfs::deepspeed::native
