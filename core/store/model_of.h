// SPDX-License-Identifier: Apache-2.0
//
// The model of a step, for those that keep a model alive and know no store.
//
// Thread safety: pure function.
// Lifetime: what is returned keeps the whole step.

#pragma once

#include <memory>
#include <utility>

#include "core/store/store.h"

namespace ckptfs {

inline std::shared_ptr<const StepModel> ModelOf(std::shared_ptr<const Step> step) {
  const StepModel* model = &step->model;
  return {std::move(step), model};
}

}  // namespace ckptfs
