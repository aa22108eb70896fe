// SPDX-License-Identifier: Apache-2.0
//
// A saved state may have other modules beside the model: a critic, a head, a criterion, each a
// dict of tensors.  OwnerOf tells whether an optimizer trains one of them rather than the
// model.  Its members' names, and the shapes that their states tell, count; the module to which
// most members fit is the optimizer's.  Of those to which as many fit, in this order:
//
//   exact   the module that has a member for each of its parameters
//   keys    the module whose key and the optimizer's have a word together that the others' keys
//           lack ("critic", "critic_optim"; "generator", "optim_g"; "actor.model", "actor.optim");
//           the model, if the optimizer's key has no word of its own, and another optimizer's has
//           one of the other module's
//
// Otherwise nobody knows.  An average (IsAverageKey, IsAverageState) and a copy of the model
// ("best_model", "old_policy") train nothing, unless the optimizer's key has their word.
//
// Thread safety: pure functions.
// Lifetime: the spans must outlive the call.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/state/model_choice.h"
#include "core/state/ownership.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct TrainableModule {
  std::string key;  // where it stands in the state: "critic", "actor.model"
  std::vector<OwnableParameter> parameters;
  bool average = false;  // IsAverageState
};

// The tensors of a dict but for buffers.
TrainableModule TrainableModuleOf(const ModelCandidate& candidate);

// True if the key calls what it leads to a copy of the model: "best_model", "old_policy".
bool IsCopyKey(std::string_view key);

// A member of an optimizer, as far as the file tells.
struct ToldMember {
  std::string_view name;         // "": it has a number alone
  const Shape* shape = nullptr;  // of its parameter; null: its states do not tell it
};

struct OptimizerOfState {
  std::string_view key;
  std::vector<ToldMember> members;
  std::vector<std::string_view> beside;  // keys of the state's other optimizers
};

// True if the shapes of both are the same.
bool AreTwins(const TrainableModule& a, const TrainableModule& b);

// True if an optimizer may train the other module besides the model.
bool MayBeTrained(const TrainableModule& model, const TrainableModule& other);

// True if an optimizer's key has more words of another module's key than of the model's:
// "optimizer_target" of "target".
bool IsCalledAs(std::string_view optimizer, std::string_view other, std::string_view model);

// The module that an optimizer trains, as far as members and keys tell.
enum class TrainedModule : uint8_t {
  kModel,
  kAnother,
  kUnknown,  // the model or another
};

struct OptimizerOwner {
  TrainedModule module = TrainedModule::kModel;
  std::string why = {};  // why not kModel
};

OptimizerOwner OwnerOf(const OptimizerOfState& optimizer, const TrainableModule& model,
                       std::span<const TrainableModule> others);

}  // namespace ckptfs
