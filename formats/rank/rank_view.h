// SPDX-License-Identifier: Apache-2.0
//
// RankFormat shows what each rank of a layout would hold, framework-neutral:
//
//   rank<N>/model.safetensors      the rank's shard of every weight and buffer
//   rank<N>/model.pt               the same as a flat dict (torch.load)
//   rank<N>/optimizer.safetensors  masters, moments and steps, "<kind>/<name>"
//   rank<N>/optimizer.pt
//   rank<N>/info.json              which part of which tensor each one is
//
// N from 0 to the layout's world - 1.  docs/reference/view-formats.md has the rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>

#include "core/view/view_format.h"

namespace ckptfs {

class RankFormat : public ViewFormat {
 public:
  std::string_view name() const override { return "rank"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;
};

}  // namespace ckptfs
