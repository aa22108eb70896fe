// SPDX-License-Identifier: Apache-2.0
#include "formats/tools/step_names.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(StepNamesTest, TheNumberOfEveryToolsForm) {
  for (const auto& [name, number] : std::initializer_list<std::pair<const char*, uint64_t>>{
           {"checkpoint-500", 500},
           {"checkpoint_3", 3},
           {"step-1000", 1000},
           {"step_7", 7},
           {"step7", 7},
           {"epoch_2", 2},
           {"global_step12", 12},
           {"iter_0000500", 500},
           {"epoch=1-step=20.ckpt", 20},
           {"epoch=1-step=20-v1.ckpt", 20},
           {"epoch=3-step=40-val_loss=0.25.ckpt", 40},
           {"run-epoch=4.ckpt", 4},
           {"step=9", 9}}) {
    EXPECT_EQ(StepNumber(name), number) << name;
  }
}

TEST(StepNamesTest, OtherNamesHaveNone) {
  for (const char* name :
       {"", "checkpoint", "checkpoint-", "checkpoint-5a", "checkpoint-best", "last.ckpt", "llama-7",
        "steps-3", "mystep=5", "checkpoint-99999999999999999999999", "checkpoint--5", "-500",
        "model.safetensors", "step-5.tmp"}) {
    EXPECT_EQ(StepNumber(name), std::nullopt) << name;
  }
}

TEST(StepNamesTest, NamesOfTools) {
  EXPECT_TRUE(IsTrainerName("checkpoint-5"));
  EXPECT_FALSE(IsTrainerName("checkpoint_5"));
  EXPECT_FALSE(IsTrainerName("checkpoint-5-old"));
  EXPECT_TRUE(IsLightningName("last.ckpt"));
  EXPECT_FALSE(IsLightningName(".ckpt"));
  EXPECT_FALSE(IsLightningName(".hidden.ckpt"));
}

}  // namespace
}  // namespace ckptfs
