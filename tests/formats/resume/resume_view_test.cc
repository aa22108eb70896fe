// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/resume_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

TinyStepOptions SavedBy(const std::string& tool) {
  TinyStepOptions options;
  options.tool = tool;
  return options;
}

void Rename(StepModel& step, std::string_view from, const std::string& to) {
  for (Blob& blob : step.blobs) {
    if (blob.path == from) blob.path = to;
  }
}

std::set<std::string> Names(const View& view, std::string_view directory) {
  std::set<std::string> names;
  const std::vector<ViewEntry> entries = view.List(directory).value();
  for (const ViewEntry& entry : entries) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name << " twice";
  }
  return names;
}

std::shared_ptr<const View> Open(const TinyStep& step, StepTool tool, std::string_view layout) {
  return ResumeFormat(tool)
      .Open(ShownState::Of(step.shared(), Layout::Parse(layout).value()))
      .value();
}

std::string Refusal(const TinyStep& step, StepTool tool, std::string_view layout) {
  const auto view =
      ResumeFormat(tool).Open(ShownState::Of(step.shared(), Layout::Parse(layout).value()));
  return view ? "none" : view.error().message;
}

// A job may have left anything beside its states.
TEST(ResumeViewTest, WhatIsShownTakesThePlaceOfFilesOfItsName) {
  TinyStep step(SavedBy("accelerate"));
  Rename(step.model(), "more/notes.txt", "optimizer_0/notes.txt");
  Rename(step.model(), "scheduler.bin", "optimizer.bin/more");
  const auto view = Open(step, StepTool::kAccelerate, "dp2_accelerate");
  const std::set<std::string> names = Names(*view, "accelerate");
  for (const char* name : {"pytorch_model_fsdp_0", "optimizer_0", "pytorch_model", "latest",
                           "model.safetensors", "optimizer.bin"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_TRUE(Names(*view, "accelerate/optimizer_0").contains(".metadata"));
  EXPECT_EQ(view->Find("accelerate/optimizer.bin")->type, ViewEntry::Type::kFile);
  EXPECT_FALSE(view->Find("accelerate/optimizer.bin/more"));
}

// The states are re-laid; what only ends like them is a job's own.
TEST(ResumeViewTest, TheTagIsWhereDeepSpeedsFilesAre) {
  TinyStep step(SavedBy("trainer"));
  Rename(step.model(), "more/notes.txt", "eval/logits_states.pt");
  Rename(step.model(), "scheduler.bin", "own/mp_rank_00_model_states.pt");
  const auto view = Open(step, StepTool::kTrainer, "dp2");
  EXPECT_TRUE(view->Find("trainer/eval/logits_states.pt"));
  EXPECT_FALSE(view->Find("trainer/own/mp_rank_00_model_states.pt"));
}

// A file of another tag, model or schedule is never shown beside an optimizer as its own.
TEST(ResumeViewTest, TrainersOptimizerIsShownWhereItWouldLoadIt) {
  TinyStep step(SavedBy("trainer"));
  Rename(step.model(), "scheduler.pt", "schedule_of_mine.pt");
  Rename(step.model(), "scheduler.bin", "schedule_of_mine.bin");
  const auto view = Open(step, StepTool::kTrainer, "dp2");
  EXPECT_FALSE(view->Find("trainer/optimizer.pt"));
  EXPECT_TRUE(view->Find("trainer/ckptfs.txt"));
  EXPECT_THAT(Refusal(step, StepTool::kTrainer, "dp2_accelerate"), HasSubstr("scheduler.pt"));
}

// The layout's weights stand for the model's files, not for what else is in their format.
TEST(ResumeViewTest, AJobsOwnFilesOfWeightsStay) {
  TinyStep step(SavedBy("trainer"));
  Rename(step.model(), "more/notes.txt", "embeddings.safetensors");
  Rename(step.model(), "scheduler.bin", "model-00001-of-00002.safetensors");
  const auto view = Open(step, StepTool::kTrainer, "dp2_bf16");
  EXPECT_TRUE(view->Find("trainer/embeddings.safetensors"));
  EXPECT_TRUE(view->Find("trainer/model.safetensors"));
  EXPECT_FALSE(view->Find("trainer/model-00001-of-00002.safetensors"));
}

// The weights beside two tags in one directory belong to one of them, and nothing says which.
TEST(ResumeViewTest, WeightsBesideSeveralTagsAreOfNoneForCertain) {
  TinyStep step(SavedBy("trainer"));
  Rename(step.model(), "more/notes.txt", "pytorch_model.bin");
  Rename(step.model(), "scheduler.bin", "global_step4/mp_rank_00_model_states.pt");
  EXPECT_TRUE(Open(step, StepTool::kTrainer, "dp2")->Find("trainer/pytorch_model.bin"));
  step.model().id = "checkpoint-5-global_step4";
  const auto view = Open(step, StepTool::kTrainer, "dp2");
  EXPECT_FALSE(view->Find("trainer/pytorch_model.bin"));
  EXPECT_TRUE(view->Find("trainer/model.safetensors"));
}

TEST(ResumeViewTest, SeveralEnginesInOneSaveAreRefused) {
  TinyStep step(SavedBy("accelerate"));
  Rename(step.model(), "more/notes.txt", "pytorch_model_1/mp_rank_00_model_states.pt");
  EXPECT_THAT(Refusal(step, StepTool::kAccelerate, "dp2"), HasSubstr("'pytorch_model_1/'"));
}

// A Trainer without FSDP refuses a directory that has them.
TEST(ResumeViewTest, DirectoriesOfFsdpAreThereWhereTheyAreAskedFor) {
  const TinyStep step(SavedBy("trainer"));
  EXPECT_FALSE(Open(step, StepTool::kTrainer, "dp2")->Find("trainer/optimizer_0"));
  EXPECT_TRUE(Open(step, StepTool::kTrainer, "dp2_accelerate")->Find("trainer/optimizer_0"));
}

TEST(ResumeViewTest, AStepWithoutACertainOrderSaysSo) {
  TinyStep step(SavedBy("trainer"));
  step.model().layout.zero = 2;  // and no ds_config
  const auto view = Open(step, StepTool::kTrainer, "tp1");
  EXPECT_FALSE(view->Find("trainer/optimizer.pt"));
  EXPECT_TRUE(view->Find("trainer/ckptfs.txt"));
  EXPECT_THAT(view->LeftOut(), Contains(HasSubstr("optimizer.pt")));
}

// The parts that other formats' directories in it leave out, and a directory that cannot be shown.
TEST(ResumeViewTest, WhatItsPartsLeaveOutIsSaid) {
  TinyStep step(SavedBy("accelerate"));
  EXPECT_THAT(Open(step, StepTool::kAccelerate, "dp2")->LeftOut(), Contains(HasSubstr("frozen")));
  EXPECT_THAT(Open(step, StepTool::kAccelerate, "dp2_accelerate")->LeftOut(),
              Contains(HasSubstr("FSDP1")));
  step.model().framework = "dcp";
  for (Atom& atom : step.model().atoms) {
    if (atom.kind == "exp_avg") atom.kind = "other";
  }
  step.model().BuildIndex();
  EXPECT_THAT(Open(step, StepTool::kAccelerate, "dp2_zero3")->LeftOut(),
              Contains(HasSubstr("DeepSpeed's directory: ")));
}

TEST(ResumeViewTest, OneReasonForAllToolsButItsOwn) {
  const TinyStep step(SavedBy("trainer"));
  EXPECT_EQ(Refusal(step, StepTool::kAccelerate, "tp1"),
            Refusal(step, StepTool::kLightning, "tp1"));
  EXPECT_THAT(Refusal(step, StepTool::kLightning, "tp1"),
              HasSubstr("but by transformers' Trainer"));
  const TinyStep alone(TinyStepOptions{});
  EXPECT_THAT(Refusal(alone, StepTool::kTrainer, "tp1"), HasSubstr("not saved by a training tool"));
}

TEST(ResumeViewTest, WhatIsNotReLaidIsRefusedByName) {
  TinyStep step(SavedBy("accelerate"));
  step.model().framework = "dcp";
  EXPECT_THAT(Refusal(step, StepTool::kAccelerate, "titan"), HasSubstr("keys of its own"));
  Rename(step.model(), "more/notes.txt", "pytorch_model_fsdp_1/.metadata");
  EXPECT_THAT(Refusal(step, StepTool::kAccelerate, "dp2"), HasSubstr("'pytorch_model_fsdp_1/'"));
}

// Lightning's strategies keep one directory, with a file of their own beside what DCP saved.
TEST(ResumeViewTest, LightningsDirectoryIsTheLayouts) {
  TinyStep step(SavedBy("lightning"));
  step.model().framework = "dcp";
  EXPECT_THAT(Refusal(step, StepTool::kLightning, "dp2"), HasSubstr("meta.pt is missing"));
  Rename(step.model(), "more/notes.txt", "meta.pt");
  Rename(step.model(), "scheduler.bin", "__7_0.distcp");
  const auto view = Open(step, StepTool::kLightning, "dp2");
  EXPECT_THAT(Names(*view, "lightning"), IsSupersetOf({".metadata", "__0_0.distcp", "meta.pt"}));
  EXPECT_FALSE(Names(*view, "lightning").contains("__7_0.distcp"));
  EXPECT_FALSE(view->Find("lightning/__7_0.distcp"));
  EXPECT_FALSE(view->Find("lightning/checkpoint"));
  EXPECT_TRUE(view->MakePlan("lightning/.metadata"));
  EXPECT_TRUE(view->MakePlan("lightning/meta.pt"));
  EXPECT_THAT(Refusal(step, StepTool::kLightning, "dp2_titan"), HasSubstr("keys of their own"));
  step.model().framework = "deepspeed";
  EXPECT_THAT(Refusal(step, StepTool::kLightning, "dp2_accelerate"),
              HasSubstr("keys of their own"));
}

}  // namespace
}  // namespace ckptfs
