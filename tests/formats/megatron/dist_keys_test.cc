// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/dist_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ckptfs::megatron {
namespace {

TEST(DistKeysTest, ATensorOfAllLayersHasANameForEach) {
  const auto name = StackedNameOf("decoder.layers.mlp.linear_fc1.weight");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->OfLayer(12), "decoder.layers.12.mlp.linear_fc1.weight");
  const auto inside = StackedNameOf("language_model.decoder.layers.a");
  ASSERT_TRUE(inside.has_value());
  EXPECT_EQ(inside->OfLayer(0), "language_model.decoder.layers.0.a");
  for (const char* other : {"decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.7",
                            "decoder.layers.", "decoder.final_layernorm.weight",
                            "mydecoder.layers.a", "embedding.word_embeddings.weight"}) {
    EXPECT_FALSE(StackedNameOf(other).has_value()) << other;
  }
}

TEST(DistKeysTest, ATensorOfOneLayerHasItsNumber) {
  const auto name = LayeredNameOf("decoder.layers.12.mlp.linear_fc1.weight");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->before, "decoder.layers.");
  EXPECT_EQ(name->layer, 12u);
  EXPECT_EQ(name->after, "mlp.linear_fc1.weight");
  for (const char* other :
       {"decoder.layers.mlp.weight", "decoder.layers.7", "decoder.layers.7.", "decoder.layers.",
        "decoder.layers.07.a", "decoder.layers.+7.a", "decoder.layers.99999999999999999999.a",
        "mydecoder.layers.3.a", "output_layer.weight"}) {
    EXPECT_FALSE(LayeredNameOf(other).has_value()) << other;
  }
}

TEST(DistKeysTest, AnOptimizersKeySaysStateAndTensorOrIsABucket) {
  const auto state = OptimizerKeyOf("optimizer.state.exp_avg.decoder.layers.a.weight");
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->kind, "exp_avg");
  EXPECT_EQ(state->tensor, "decoder.layers.a.weight");
  const auto chained = OptimizerKeyOf("chained_1.optimizer.state.param.b");
  ASSERT_TRUE(chained.has_value());
  EXPECT_EQ(chained->chain, "chained_1.");
  EXPECT_EQ(chained->tensor, "b");
  for (const char* bucket :
       {"optimizer.distributed.dp_group_idx_0.optimizer", "optimizer.state",
        "optimizer.state.exp_avg", "optimizer.state..a", "optimizer.state.a."}) {
    const auto key = OptimizerKeyOf(bucket);
    ASSERT_TRUE(key.has_value()) << bucket;
    EXPECT_EQ(key->kind, "") << bucket;
  }
  for (const char* other : {"optimizers.state.a.b", "chained_x.optimizer.state.a.b", "chained_1",
                            "chained_.optimizer.a", "decoder.optimizer.state.a.b"}) {
    EXPECT_FALSE(OptimizerKeyOf(other).has_value()) << other;
  }
}

TEST(DistKeysTest, AnObjectIsNamedWithoutItsPlace) {
  EXPECT_EQ(ObjectName("rng_state/shard_0.1_2.2"), "rng_state");
  EXPECT_EQ(ObjectName("decoder.layers.a._extra_state/shard_0_4"), "decoder.layers.a._extra_state");
  EXPECT_EQ(ObjectName("plain"), "plain");
  EXPECT_EQ(ObjectPlace("rng_state/shard_0.1_2.2"), "0.1_2.2");
  EXPECT_EQ(ObjectPlace("plain"), "");
  EXPECT_THAT(PlacesOf({1}), testing::ElementsAre("0_1"));
  EXPECT_THAT(PlacesOf({2, 3}), testing::ElementsAre("0.0_2.3", "0.1_2.3", "0.2_2.3", "1.0_2.3",
                                                     "1.1_2.3", "1.2_2.3"));
}

}  // namespace
}  // namespace ckptfs::megatron
