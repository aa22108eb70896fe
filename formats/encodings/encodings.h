// SPDX-License-Identifier: Apache-2.0
//
// Encodings show steps whose weights are stored with a scale per block (fp8 as DeepSeek writes it,
// MXFP4 as gpt_oss is published): decoded where a layout asks for a dtype, and cut between blocks
// where it does not.  The config's quantization_config says the method; which tensors it is true of
// is proved by their names, types and shapes (core/encoding/encoded_weights.h).
//
// Thread safety: all methods may be called concurrently.
// Lifetime: steps are their callers'; a kept one keeps the step that it was made of.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/base/loading_cache.h"
#include "core/base/result.h"
#include "core/encoding/encoded_weights.h"
#include "core/model/family.h"
#include "core/model/step_model.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

class Encodings {
 public:
  // Bounds the steps that are kept beside those used last.
  static constexpr uint64_t kKeptBytes = uint64_t{256} << 20;

  enum class Form : uint8_t { kCut, kDecoded };

  // `given`: for steps that do not have a config.json (mount --hf-config).
  static Result<std::shared_ptr<Encodings>> Make(std::optional<ModelFiles> given);

  // Nothing where the config says no method that is known here.
  std::optional<EncodingConfig> ConfigOf(const StepModel& step) const;

  // A tensor that a cast does not make another weight of, in a step that ConfigOf says nothing of.
  std::optional<std::string_view> PackedTensorOf(const StepModel& step) const;

  // The step in that form.  kUnsupported names the tensor that does not fit.
  // REQUIRES: ConfigOf(*step) has a value.
  Result<std::shared_ptr<const StepModel>> To(const std::shared_ptr<const StepModel>& step,
                                              Form form);

 private:
  struct Key {
    const StepModel* step = nullptr;
    Form form = Form::kCut;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<const StepModel*>()(key.step) * 2 + static_cast<size_t>(key.form);
    }
  };
  struct Made {
    std::shared_ptr<const StepModel> of;  // no other step has its address meanwhile
    std::shared_ptr<const StepModel> step;
  };
  using MadePtr = std::shared_ptr<const Made>;

  Encodings(std::optional<ModelFiles> given, FamilySet families);
  Result<MadePtr> MakeForm(const std::shared_ptr<const StepModel>& step, Form form) const;

  const std::optional<ModelFiles> given_;
  const FamilySet families_;
  LoadingCache<Key, MadePtr, KeyHash> kept_;
};

}  // namespace ckptfs
