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
           {"epoch=8-train_loss_epoch=1.25.ckpt", 8},
           {"val_loss_step=2.25-epoch=9-step=90.ckpt", 90},
           {"step=9", 9},
           {"ep0-ba1000", 1000},
           {"1000", 1000},
           {"iter-001000-ckpt", 1000},
           {"step1000-unsharded", 1000},
           {"epoch_1_step_20", 0},
           {"epoch-3-step-7", 0},
           {"step_20_epoch_1", 0},
           {"checkpoint-epoch-4", 4},
           {"checkpoint_step_5", 5}}) {
    EXPECT_EQ(StepNumber(name), number) << name;
  }
}

TEST(StepNamesTest, OtherNamesHaveNone) {
  for (const char* name : {"",
                           "checkpoint",
                           "checkpoint-",
                           "checkpoint-5a",
                           "checkpoint-best",
                           "last.ckpt",
                           "llama-7",
                           "steps-3",
                           "mystep=5",
                           "checkpoint-99999999999999999999999",
                           "checkpoint--5",
                           "-500",
                           "model.safetensors",
                           "step-5.tmp",
                           "step-5-",
                           "5-step",
                           "llama-7-step",
                           "global",
                           "hf",
                           "rank0",
                           "model_5",
                           "1000a"}) {
    EXPECT_EQ(StepNumber(name), std::nullopt) << name;
  }
}

TEST(StepNamesTest, FilesHaveOtherWordsAndSuffixes) {
  EXPECT_EQ(FileNumber("ckpt_800.pth"), 800);
  EXPECT_EQ(FileNumber("model_0000900.pth"), 900);
  EXPECT_EQ(FileNumber("checkpoint0010.pth.tar"), 10);
  EXPECT_EQ(FileNumber("model-step-7.safetensors"), 7);
  EXPECT_EQ(FileNumber("epoch=1-step=20.ckpt"), 20);
  EXPECT_EQ(FileNumber("run-epoch=4.ckpt"), 4);
  for (const char* name : {"resnet50.pth", "model.pt", "model_best.pth.tar", "v1.5.pt",
                           "model-00001-of-00002.safetensors", ".pt", ""}) {
    EXPECT_EQ(FileNumber(name), std::nullopt) << name;
  }
}

// Whatever words a script has: the number in which its names differ.
TEST(StepNamesTest, NamesThatAreAlikeDifferInTheirNumber) {
  using Names = std::vector<std::string>;
  const auto of = [](std::string_view name, Names names) { return SiblingNumber(name, names); };
  EXPECT_EQ(of("G_800.pth", {"G_1000.pth", "D_900.pth"}), 800);
  EXPECT_EQ(of("10_net_G.pth", {"8_net_G.pth", "9_net_G.pth", "10_net_G.pth"}), 10);
  EXPECT_EQ(of("llama-7b-step800.pt", {"llama-7b-step900.pt"}), 800);
  EXPECT_EQ(of("model_8_val_acc=0.91.pt", {"model_9_val_acc=0.9.pt"}), 8);
  EXPECT_EQ(of("ant_ep_800_rew_100.pth", {"ant_ep_900_rew_90.5.pth"}), 800);
  EXPECT_EQ(of("checkpoint_1_800.pt", {"checkpoint_1_900.pt", "checkpoint_2_1000.pt"}), 800);
  EXPECT_EQ(of("checkpoint.8.pt", {"checkpoint.10.pt"}), 8);
  // Steps that begin anew in each epoch, one number twice, and nobody beside it.
  EXPECT_EQ(of("checkpoint_1_800.pt", {"checkpoint_2_100.pt"}), std::nullopt);
  EXPECT_EQ(of("a_1_5.pt", {"a_01_6.pt", "a_1_4.pt"}), 5);
  EXPECT_EQ(of("a_1.pt", {"a_01.pt"}), std::nullopt);
  EXPECT_EQ(of("G_800.pth", {"G_800.pth", "G_best.pth"}), std::nullopt);
  EXPECT_EQ(of("a_99999999999999999999999.pt", {"a_1.pt"}), std::nullopt);
}

TEST(StepNamesTest, NamesThatCountEpochs) {
  for (const char* name : {"epoch_8.pth", "epoch8.pt", "checkpoint-epoch-4.pth", "ep3.pt"}) {
    EXPECT_TRUE(CountsEpochs(name)) << name;
  }
  for (const char* name : {"ckpt_8.pth", "step_8.pt", "model_best.pth", "deep_8.pth", "8.pth"}) {
    EXPECT_FALSE(CountsEpochs(name)) << name;
  }
}

TEST(StepNamesTest, VersionsOfLightningsNames) {
  const auto named = VersionOf("epoch=1-step=20-v3.ckpt");
  ASSERT_TRUE(named);
  EXPECT_EQ(named->first, "epoch=1-step=20.ckpt");
  EXPECT_EQ(named->version, 3u);
  EXPECT_EQ(VersionOf("last-v1.ckpt")->first, "last.ckpt");
  for (const char* name : {"last.ckpt", "a-v.ckpt", "a-v0.ckpt", "-v1.ckpt", "a-v1.pt", "a-v1",
                           "a-v1-b.ckpt", "a-v99999999999.ckpt", "av1.ckpt"}) {
    EXPECT_FALSE(VersionOf(name)) << name;
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
