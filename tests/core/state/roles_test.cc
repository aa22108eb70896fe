// SPDX-License-Identifier: Apache-2.0

#include "core/state/roles.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ckptfs {
namespace {

const HasTensor kAlone;

Role Untold(std::string_view name, DType dtype = DType::kF32, const Shape& shape = {8}) {
  return RoleOf(name, dtype, shape, Trained::kUnknown, kAlone);
}

TEST(RolesTest, BuffersOfTorchAndTransformersAreKnownByTheirNames) {
  for (const char* name :
       {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "running_mean", "inv_freq",
        "model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq", "enc.masked_bias",
        "model.rotary_emb.full_attention_inv_freq", "rope.freqs", "layers.0.rope.freqs",
        "mlp.gate.e_score_correction_bias", "conv.parametrizations.weight.0._u"}) {
    EXPECT_EQ(Untold(name), Role::kBuffer) << name;
  }
}

TEST(RolesTest, WholeNumbersAreBuffersAndOtherNumbersAreNot) {
  EXPECT_EQ(Untold("weight", DType::kI8), Role::kBuffer);
  EXPECT_EQ(Untold("seen", DType::kBool), Role::kBuffer);
  for (const DType dtype : {DType::kF64, DType::kBF16, DType::kF8E4M3, DType::kC64}) {
    EXPECT_EQ(Untold("weight", dtype), Role::kTrainable);
  }
}

// A tensor that is not known to be a buffer is a parameter.
TEST(RolesTest, NamesThatParametersHaveAreParameters) {
  for (const char* name :
       {"bias", "h.0.attn.bias", "attn.c_attn.bias", "scale", "mean", "layers.0.freqs", "freqs",
        "my_running_mean", "trope.freqs", "encoder.embed_positions.weight", "conv.weight_v",
        "conv.weight_u", "a._u", "x_mask", "normalizer.std"}) {
    EXPECT_EQ(Untold(name), Role::kTrainable) << name;
  }
}

TEST(RolesTest, ACausalMaskIsKnownByItsShape) {
  const auto role = [](const char* name, const Shape& shape) {
    return Untold(name, DType::kF32, shape);
  };
  EXPECT_EQ(role("transformer.h.0.attn.bias", {1, 1, 16, 16}), Role::kBuffer);
  EXPECT_EQ(role("gpt_neox.layers.0.attention.bias", {1, 1, 16, 16}), Role::kBuffer);
  EXPECT_EQ(role("transformer.h.0.attn.attention.bias", {1, 1, 16, 16}), Role::kBuffer);
  EXPECT_EQ(role("transformer.h.0.attn.bias", {48}), Role::kTrainable);
  EXPECT_EQ(role("transformer.h.0.attn.bias", {1, 1, 16, 8}), Role::kTrainable);
  EXPECT_EQ(role("transformer.h.0.attn.bias", {1, 1, 1, 1}), Role::kTrainable);
  EXPECT_EQ(role("conv.bias", {1, 1, 16, 16}), Role::kTrainable);
  EXPECT_EQ(role("bias", {1, 1, 16, 16}), Role::kTrainable);
}

TEST(RolesTest, WhatSpectralNormAndPruningKeepIsKnownByTheOriginal) {
  const auto role = [](const std::set<std::string>& names, const char* name) {
    return RoleOf(name, DType::kF32, {8}, Trained::kUnknown,
                  [&](std::string_view asked) { return names.contains(std::string(asked)); });
  };
  EXPECT_EQ(role({"conv.weight_orig"}, "conv.weight_u"), Role::kBuffer);
  EXPECT_EQ(role({"conv.weight_orig"}, "conv.weight_v"), Role::kBuffer);
  EXPECT_EQ(role({"conv.weight_orig"}, "conv.weight_mask"), Role::kBuffer);
  EXPECT_EQ(role({"conv.weight_g"}, "conv.weight_v"), Role::kTrainable);  // weight_norm's
}

TEST(RolesTest, WhatAnOptimizerTrainsIsNeverABuffer) {
  const auto role = [](const char* name, DType dtype, Trained trained) {
    return RoleOf(name, dtype, {8}, trained, kAlone);
  };
  EXPECT_EQ(role("rope.inv_freq", DType::kF32, Trained::kYes), Role::kTrainable);
  EXPECT_EQ(role("packed", DType::kI8, Trained::kYes), Role::kTrainable);
  EXPECT_EQ(role("rope.inv_freq", DType::kF32, Trained::kNo), Role::kBuffer);
  EXPECT_EQ(role("embed.weight", DType::kF32, Trained::kNo), Role::kFrozen);
}

}  // namespace
}  // namespace ckptfs
