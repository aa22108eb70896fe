// SPDX-License-Identifier: Apache-2.0
//
// FsdpTensors puts the model's tensors of a directory of --ckpt-format fsdp_dtensor together, as
// dist_checkpointing would name them: the halves of a gated linear_fc1 are one tensor [gate; up],
// and the experts of a layer are one tensor of one dimension more.
//
// Megatron-FSDP does not use dist_checkpointing's rules, so there are saves in which ranks have
// written over each other's tensors: biases of experts have the same names on all ranks of expert
// parallelism.  The arguments say how many experts and layers there must be; a save that lacks one
// is refused.  Without arguments all layers must have as many experts, and no layer may be missing
// between others.
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"
#include "formats/dcp/metadata.h"
#include "formats/dcp/stored_state.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {

// A tensor's parts have to agree with this.
struct FsdpJob {
  // By the arguments; nothing where there are none.
  std::optional<uint64_t> layers, experts;  // experts of a layer; 0: it has none
  std::optional<uint32_t> tp, etp;          // etp: tensor ranks of an expert
  bool gated = false;
};

// kInvalid names an argument that is not there.
Result<FsdpJob> FsdpJobOf(const CommonState& common);
// The same of a save without arguments, where the optimizer's hyper-parameters, which name each
// parameter as the module does, agree with all names of the model: a half's parameter is among
// them, and the half is not.  Nothing where they do not.
std::optional<FsdpJob> FsdpJobOf(const dcp::DcpMetadata& metadata);

struct FsdpTensor {
  struct Part {
    std::string stored;     // the parameter's name with the half's ending, as states have it
    std::string parameter;  // without it, as groups have it
    dcp::StoredState::Inset inset;
  };
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<Part> parts;

  std::vector<dcp::StoredState::Inset> Insets() const;
};

// In the order of modules.  kInvalid names a tensor and the rule, kUnsupported what is not known.
Result<std::vector<FsdpTensor>> FsdpTensorsOf(const dcp::DcpMetadata& metadata, const FsdpJob& job);

}  // namespace ckptfs::megatron
