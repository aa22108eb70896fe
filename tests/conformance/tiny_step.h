// SPDX-License-Identifier: Apache-2.0
//
// TinyStep is a made-up step whose every element says where it belongs: the
// fp32 element i of atom a is a * 4096 + i (bf16 and others: the same value
// rounded), so that a misplaced byte names its origin.  It has a padded
// vocabulary, a fused projection of unequal parts, a gate/up pair, a row-parallel
// weight, norms, a tied head, a buffer, a frozen bias, a 0-d and an empty
// parameter, experts and layers.
//
// Thread safety: none.
// Lifetime: removes its directory when destroyed.

#pragma once

#include <memory>
#include <string>

#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct TinyStepOptions {
  uint32_t layers = 2;
  uint32_t experts = 0;      // per layer
  bool weights = true;       // false: only masters (ZeRO-3)
  bool lazy_state = false;   // one parameter without moments and step
  bool python_step = false;  // step is a Python int
  uint32_t groups = 1;       // 2: norms have their own
  std::string tool = {};     // "trainer": what it wrote lies around the step
  bool configured = false;   // of tp 2, with a ds_config: bf16, dealt gradients, small sub-groups
  bool megatron = false;     // under Megatron's names, with the marks of its groups
};

class TinyStep {
 public:
  explicit TinyStep(const TinyStepOptions& options);
  ~TinyStep();
  TinyStep(const TinyStep&) = delete;
  TinyStep& operator=(const TinyStep&) = delete;

  const StepModel& model() const { return *model_; }
  // REQUIRES: no view of it is open yet.
  StepModel& model() { return *model_; }
  std::shared_ptr<const StepModel> shared() const { return model_; }
  BlobReader& blobs() { return *blobs_; }
  const std::string& directory() const { return directory_; }

  // Returns the value of element `index` of an atom, as fp32.
  static float Value(AtomIndex atom, uint64_t index) {
    return static_cast<float>(static_cast<uint32_t>(atom) * 4096 + index);
  }

 private:
  std::string directory_;
  std::shared_ptr<StepModel> model_;
  std::unique_ptr<BlobReader> blobs_;
};

}  // namespace ckptfs
