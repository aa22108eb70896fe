// SPDX-License-Identifier: Apache-2.0
//
// MegatronLegacyFormat shows a step's weights as the directory that Megatron loads with
// --ckpt-format torch, as its own tools/checkpoint/convert.py writes it: a release, with which a
// job begins at iteration 0, without optimizer or random states.
//
//   megatron_legacy/latest_checkpointed_iteration.txt       "release"
//   megatron_legacy/release/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt
//
// The files are those of the layout's ranks: tp, pp, vpp and ep must be the job's.
// docs/reference/view-formats.md has the rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "core/view/view_format.h"
#include "formats/dialects/translations.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

class MegatronLegacyFormat : public ViewFormat {
 public:
  // `given`: for steps that do not have a config.json (mount --hf-config).
  MegatronLegacyFormat(std::shared_ptr<Translations> translations, std::optional<ModelFiles> given)
      : translations_(std::move(translations)), given_(std::move(given)) {}

  std::string_view name() const override { return "megatron_legacy"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const std::shared_ptr<Translations> translations_;
  const std::optional<ModelFiles> given_;
};

}  // namespace ckptfs
