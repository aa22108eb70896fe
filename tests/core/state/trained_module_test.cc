// SPDX-License-Identifier: Apache-2.0
#include "core/state/trained_module.h"

#include <gmock/gmock.h>

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using Tensors = std::vector<std::pair<std::string, Shape>>;

const Tensors kPolicy = {
    {"0.weight", {16, 16}}, {"0.bias", {16}}, {"1.weight", {10, 16}}, {"1.bias", {10}}};
const Tensors kValue = {
    {"0.weight", {16, 16}}, {"0.bias", {16}}, {"1.weight", {1, 16}}, {"1.bias", {1}}};
const Tensors kHead = {{"weight", {10, 16}}, {"bias", {10}}};
const Tensors kLarger = {{"0.weight", {16, 16}}, {"0.bias", {16}},      {"1.weight", {10, 16}},
                         {"1.bias", {10}},       {"2.weight", {2, 10}}, {"2.bias", {2}}};

TrainableModule Of(const std::string& key, const Tensors& tensors) {
  TrainableModule module{key, {}};
  for (const auto& [name, shape] : tensors) module.parameters.push_back({name, shape});
  return module;
}

std::vector<ToldMember> Members(const Tensors& tensors, bool named) {
  std::vector<ToldMember> members;
  for (const auto& [name, shape] : tensors)
    members.push_back({named ? std::string_view(name) : "", &shape});
  return members;
}

struct Case {
  std::string about;
  std::string optimizer;
  Tensors members;
  bool named = true;
  std::string model_key;
  Tensors model;
  std::string other_key;
  Tensors other;
  std::string why = {};  // a part of it; "": the optimizer is the model's
  std::vector<std::string_view> beside = {};
};

const std::vector<Case> kCases = {
    {"names and shapes", "optim", kPolicy, true, "model", kPolicy, "critic", kValue},
    {"names alike, other shapes", "critic_optim", kValue, true, "model", kPolicy, "critic", kValue,
     "it is the optimizer of 'critic'"},
    {"keys say nothing, shapes do", "second", kValue, true, "generator", kPolicy, "discriminator",
     kValue, "of 'discriminator'"},
    {"numbers: all of a head, a part of the model", "optimizer", kHead, false, "model", kPolicy,
     "head", kHead, "it is the optimizer of 'head'"},
    {"numbers: all of the model, a part of another", "optimizer", kPolicy, false, "model", kPolicy,
     "decoder", kLarger},
    {"names: all of the larger one", "optimizer", kLarger, true, "encoder", kPolicy, "decoder",
     kLarger, "of 'decoder'"},
    {"a part of both", "optimizer", kHead, false, "model", kPolicy, "decoder", kLarger,
     "it may as well be the optimizer of 'decoder'"},
    {"a part of both, and a key", "decoder_optimizer", kHead, false, "model", kPolicy, "decoder",
     kLarger, "it is the optimizer of 'decoder'"},
    {"a part of both, and the model's key", "optim_enc", kHead, false, "encoder", kPolicy,
     "decoder", kLarger},
    {"twins: the critic's", "critic_optim", kPolicy, true, "model", kPolicy, "critic", kPolicy,
     "of 'critic'"},
    {"twins: a pair without words", "optim", kPolicy, true, "model", kPolicy, "critic", kPolicy,
     "may as well be the optimizer of 'critic'"},
    {"twins: the other has its own",
     "optim",
     kPolicy,
     true,
     "model",
     kPolicy,
     "critic",
     kPolicy,
     "",
     {"critic_optim"}},
    {"twins: another is nobody's",
     "optim",
     kPolicy,
     true,
     "actor",
     kPolicy,
     "critic",
     kPolicy,
     "may as well",
     {"head_optim"}},
    {"twins by number", "optimizers.critic", kPolicy, false, "model", kPolicy, "critic", kPolicy,
     "of 'critic'"},
    {"twins: a letter", "optim_d", kPolicy, true, "generator", kPolicy, "discriminator", kPolicy,
     "of 'discriminator'"},
    {"twins: camel case", "optimD", kPolicy, true, "netG", kPolicy, "netD", kPolicy, "of 'netD'"},
    {"twins: the path", "actor.optim", kPolicy, true, "actor.model", kPolicy, "critic.model",
     kPolicy},
    {"twins: nobody knows", "optimizer", kPolicy, true, "actor", kPolicy, "critic", kPolicy,
     "may as well be the optimizer of 'critic'"},
    {"twins: another word", "value_optim", kPolicy, true, "model", kPolicy, "critic", kPolicy,
     "may as well"},
    {"a copy", "optimizer", kPolicy, true, "policy", kPolicy, "old_policy", kPolicy},
    {"an average", "optimizer", kPolicy, true, "net", kPolicy, "model_ema", kPolicy},
    {"an average's own", "optimizer_target", kPolicy, true, "source", kPolicy, "target", kPolicy,
     "it is the optimizer of 'target'"},
    {"a copy's own", "best_optimizer", kPolicy, true, "model", kPolicy, "best_model", kPolicy,
     "it is the optimizer of 'best_model'"},
    {"an average of a part", "optimizer", kHead, false, "net", kPolicy, "ema", kHead},
    {"an optimizer's own name", "adamw", kPolicy, true, "model", kPolicy, "best", kPolicy},
    {"an optimizer of both", "optimizer", kLarger, false, "model", kPolicy, "head", kHead},
    {"members without states", "optimizer", {}, true, "model", kPolicy, "critic", kPolicy}};

TEST(TrainedModuleTest, SaysWhoseAnOptimizerIs) {
  for (const Case& one : kCases) {
    SCOPED_TRACE(one.about);
    const std::vector<TrainableModule> others{Of(one.other_key, one.other)};
    const std::string why = OwnerOf({one.optimizer, Members(one.members, one.named), one.beside},
                                    Of(one.model_key, one.model), others)
                                .why;
    if (one.why.empty()) {
      EXPECT_THAT(why, IsEmpty());
    } else {
      EXPECT_THAT(why, HasSubstr(one.why));
    }
  }
}

TEST(TrainedModuleTest, WithoutOtherModulesItIsTheModels) {
  const OptimizerOwner owner =
      OwnerOf({"critic_optim", Members(kValue, true), {}}, Of("model", kPolicy), {});
  EXPECT_EQ(owner.module, TrainedModule::kModel);
  EXPECT_EQ(owner.why, "");
}

}  // namespace
}  // namespace ckptfs
