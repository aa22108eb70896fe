// SPDX-License-Identifier: Apache-2.0
//
// A saved state may have other modules beside the model: a critic, a head, a criterion, each a
// dict of tensors.  TrainsAnother tells whether an optimizer trains one of them rather than the
// model.  Its members' names, and the shapes that their states tell, count; the module to which
// most members fit is the optimizer's.  Of those to which as many fit, in this order:
//
//   exact   the module that has a member for each of its parameters
//   keys    the module whose key and the optimizer's have a word together that the others' keys
//           lack ("critic", "critic_optim"; "generator", "optim_g"; "actor.model", "actor.optim")
//   twins   the model, if the other has its shapes, and is called a copy ("best_model",
//           "old_policy") or neither the model nor the optimizer has a word of its own ("model",
//           "optimizer")
//
// No module is taken for an average of weights (IsAverageKey): no optimizer trains these.
//
// Thread safety: pure functions.
// Lifetime: the spans must outlive the call.

#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/strings.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// A tensor of a module that an optimizer may train.
struct ModuleTensor {
  std::string_view name;
  const Shape* shape = nullptr;
};

struct TrainableModule {
  std::string_view key;  // where it stands in the state: "critic", "actor.model"
  std::vector<ModuleTensor> tensors;
};

// A member of an optimizer, as far as the file tells.
struct ToldMember {
  std::string_view name;         // "": it has a number alone
  const Shape* shape = nullptr;  // of its parameter; null: its states do not tell it
};

// True if the optimizer of this key may train the other module besides the model: that is neither
// an average nor a copy of the model.
bool MayTrain(std::string_view optimizer, const TrainableModule& model,
              const TrainableModule& other);

// Why the optimizer of this key is not the model's; "" if it is.
std::string TrainsAnother(std::string_view optimizer, std::span<const ToldMember> members,
                          const TrainableModule& model, std::span<const TrainableModule> others);

}  // namespace ckptfs
