// SPDX-License-Identifier: Apache-2.0
//
// ViewFormat is the seam for what a layout looks like in one framework's
// files: it opens the view of what a layout shows of a step, or says why there is none.
//
// Thread safety: stateless or internally synchronised; all methods may be
// called concurrently.
// Lifetime: views outlive the format they came from.

#pragma once

#include <memory>
#include <string_view>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "core/view/view.h"

namespace ckptfs {

class ViewFormat {
 public:
  virtual ~ViewFormat() = default;

  virtual std::string_view name() const = 0;  // "rank", "deepspeed"

  // The error is the reason why this step cannot be shown so and what would
  // settle it (a flag, a family line, another layout).
  virtual Result<std::shared_ptr<const View>> Open(
      std::shared_ptr<const ShownState> shown) const = 0;
};

}  // namespace ckptfs
