// SPDX-License-Identifier: Apache-2.0
//
// MegatronFormat shows a step as the directory that Megatron's --load takes, in torch_dist
// (megatron-core 0.16 to 0.20), at any TP, PP, VPP and EP:
//
//   megatron/latest_checkpointed_iteration.txt   "7"; "release" of a step without an iteration
//   megatron/iter_0000007/metadata.json          which backend; or release/
//   megatron/iter_0000007/common.pt              common_file.h
//   megatron/iter_0000007/.metadata              which boxes of which tensors lie where
//   megatron/iter_0000007/__<N>_0.distcp         one torch.save archive after the other
//
// Names are megatron-core's, whatever the layout says.  A step whose optimizer Megatron cannot take
// has its weights alone, and a line that says why.  docs/reference/view-formats.md has the rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/view/view_format.h"
#include "formats/dialects/translations.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

// A step under megatron-core's names, at least its weights.  The error says why they have none.
Result<std::shared_ptr<const ShownState>> AsMcore(Translations& translations,
                                                  std::shared_ptr<const ShownState> shown);

class MegatronFormat : public ViewFormat {
 public:
  static constexpr uint64_t kCutFrom = 1 << 20;

  // `given`: for steps that do not have a config.json (mount --hf-config).  `cut_from`: the bytes
  // from which a layer's tensor is cut for the layout's ranks.
  MegatronFormat(std::shared_ptr<Translations> translations, std::optional<ModelFiles> given,
                 uint64_t cut_from = kCutFrom)
      : translations_(std::move(translations)), given_(std::move(given)), cut_from_(cut_from) {}

  std::string_view name() const override { return "megatron"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const std::shared_ptr<Translations> translations_;
  const std::optional<ModelFiles> given_;
  const uint64_t cut_from_;
};

}  // namespace ckptfs
