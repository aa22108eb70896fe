// SPDX-License-Identifier: Apache-2.0
//
// HeldTensors are the model's tensors with the parts that ranks of a legacy checkpoint hold of
// each, under the names of dist_checkpointing (local_names.h).  Which ranks must hold which part is
// Megatron's own rule:
//
//   tensor ranks      each has its part, or a copy; the family's rules say which (Settle)
//   stages            a layer is on one; the embedding is on two where it is tied, or where the
//                     model predicts further tokens (mtp)
//   expert ranks      each has its own experts, and a copy of all else
//   experts' tensor   each has its rows of linear_fc1 (of gate and up apart) and its columns of
//   ranks             linear_fc2
//
// Thread safety: immutable once made.
// Lifetime: refers to the ranks.
// Units: shapes are elements.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/result.h"
#include "core/state/state_dict.h"
#include "formats/megatron/legacy/rank_model.h"
#include "formats/megatron/legacy/stage_layers.h"

namespace ckptfs::megatron {

// A tensor of a rank's module.
struct RankEntry {
  size_t rank = 0;
  uint32_t chunk = 0;
  size_t entry = 0;
  auto operator<=>(const RankEntry&) const = default;
};

// The bytes of a part: a tensor of its shape, or elements from `at` on of a flat one.
struct PartBytes {
  FileTensor tensor;
  std::optional<uint64_t> at = {};
  DType dtype() const { return tensor.dtype(); }
};

struct HeldPart {
  RankEntry of;
  uint32_t tp = 0;                        // of a tensor that is not of experts
  std::optional<LocalTensor> local = {};  // else its place in the whole
  // Parts of equal numbers are copies of each other.
  std::tuple<uint32_t, uint32_t> number = {};
};

struct HeldTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;               // of tensor rank 0's part; of all experts
  std::vector<Shape> ranks;  // of tensor ranks' parts, where there are several
  std::vector<HeldPart> parts;
  bool experts = false;
  bool copied = false;  // there is more than one part of some number
};

class HeldTensors {
 public:
  // kInvalid names the tensor, and the folder of the rank that lacks it or has another one.
  static Result<HeldTensors> Make(const JobDegrees& job, const std::vector<RankModel>& ranks,
                                  const StageLayers& layers);

  // In the order in which stages register them.
  const std::vector<HeldTensor>& all() const { return all_; }

 private:
  std::vector<HeldTensor> all_;
};

// True if the chosen parts of a tensor make up all of it, in whole copies.
bool MakeUpAll(const HeldTensor& tensor, const std::function<bool(const HeldPart&)>& chosen);

// The bytes of a part; nothing for one that is passed over.
using BytesOfPart = std::function<std::optional<PartBytes>(const HeldPart&)>;
// REQUIRES: the tensor outlives the function; the parts that have bytes MakeUpAll.
PlaceParts PlaceHeldParts(const HeldTensor& tensor, BytesOfPart bytes);

}  // namespace ckptfs::megatron
