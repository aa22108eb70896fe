// SPDX-License-Identifier: Apache-2.0
//
// ShowTensors says what a step's weights are as save_pretrained would write them:
// whole, under the names of the model itself (without the attribute of a LightningModule
// that has it), tied ones once.
//
// Thread safety: immutable values; ShowTensors is pure.
// Lifetime: refers to the step by index.
// Units: bytes where said.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "core/view/shown_state.h"

namespace ckptfs::huggingface {

struct ShownTensor {
  std::string name;
  AtomIndex atom{};
  DType dtype = DType::kF32;
  std::shared_ptr<const LocalTensor> local;  // all of it
  uint64_t elements = 0;
  uint64_t bytes = 0;
  bool trainable = false;

  AtomSegment Segment() const { return {atom, local, 0, elements, dtype}; }
};

// True if save_pretrained drops the name, of several that share a tensor.
bool IsHead(std::string_view name);

// kUnsupported for a parameter that no model of transformers has: an adapter's, say.
// REQUIRES: CheckNames() succeeds.
Status CheckForeign(const ShownState& shown);

// In model order.  kUnsupported names the parameter that has no such form: one of
// a wrapper that is not taken off (PEFT), of DeepSpeed's own experts, of a dtype
// that safetensors does not have, without a weight; or two of one name.
// REQUIRES: CheckNames() succeeds.
Result<std::vector<ShownTensor>> ShowTensors(const ShownState& shown);

// All of an adapter's, under the names that PEFT's file has.
// REQUIRES: CheckNames() succeeds.
Result<std::vector<ShownTensor>> ShowAdapter(const ShownState& shown);

}  // namespace ckptfs::huggingface
