// SPDX-License-Identifier: Apache-2.0
//
// HuggingFaceFormat shows a step as the directory that from_pretrained loads:
//
//   huggingface/model.safetensors                 up to 5 GB of tensors, or
//   huggingface/model-0000i-of-0000N.safetensors  several such files, and
//   huggingface/model.safetensors.index.json      which tensor is in which
//   huggingface/config.json, tokenizer.json, ...  the model files of the step
//
// Tensors are whole, whatever the layout's degrees.  docs/reference/view-formats.md has the
// rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <optional>

#include "core/view/view_format.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

class HuggingFaceFormat : public ViewFormat {
 public:
  // `given`: for steps that do not have a config.json (mount --hf-config).
  explicit HuggingFaceFormat(std::optional<ModelFiles> given = std::nullopt)
      : given_(std::move(given)) {}

  std::string_view name() const override { return "huggingface"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const std::optional<ModelFiles> given_;
};

}  // namespace ckptfs
