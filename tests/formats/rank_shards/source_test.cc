// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/adopt/scan.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "tests/support/stored_elements.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

// Real files (tests/golden/rank_shards/make.py), by the torch that wrote them.
class RankShardsTest : public testing::TestWithParam<std::string> {
 protected:
  RankShardsTest() : families_(ShippedFamilies().value()) {
    options_.families = &families_;
    files::copy(CKPTFS_TEST_DATA "/golden/rank_shards/" + GetParam(), directory_.path() + "/run",
                files::copy_options::recursive);
    step_ = directory_.path() + "/run/global_step_3";
    actor_ = step_ + "/actor";
  }

  std::string File(const std::string& kind, int rank) const {
    return actor_ + "/" + kind + "_world_size_2_rank_" + std::to_string(rank) + ".pt";
  }
  Result<IngestResult> Ingest(const std::string& path) {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
    return IngestPlace(place, sources_, options_);
  }
  std::string Refusal(const std::string& path) {
    const auto read = Ingest(path);
    return read ? "taken" : read.error().message;
  }
  SaveState State(const std::string& path) {
    const auto found = Scan(*PlaceOf(path), sources_).value();
    return found.at(0).source->StateOf(found.at(0).candidate, options_, {});
  }

  TemporaryDirectory directory_;
  std::string step_, actor_;
  FamilySet families_;
  SourceOptions options_;
  const std::vector<std::unique_ptr<Source>> sources_ = MakeSources();
};

std::vector<float> Counted(float first, size_t count) {
  std::vector<float> out;
  for (size_t i = 0; i < count; ++i) out.push_back(first + static_cast<float>(i));
  return out;
}

TEST_P(RankShardsTest, ShardsAreOneTensorAndStatesTheirParameters) {
  for (const std::string& path : {directory_.path() + "/run", step_, actor_}) {
    const auto read = Ingest(path);
    ASSERT_TRUE(read) << read.error().message;
    ASSERT_EQ(read->steps.size(), 1u);
    const StepModel& step = read->steps[0].model;
    EXPECT_EQ(step.framework, "rank_shards");
    EXPECT_EQ(step.id, "global_step_3");
    EXPECT_EQ(step.iteration, 3u);
    EXPECT_TRUE(step.left_out.empty());
    const std::vector<std::pair<std::string, size_t>> sizes = {
        {"embed.weight", 28}, {"body.weight", 20}, {"head.weight", 12}};
    for (size_t k = 0; k < sizes.size(); ++k) {
      const auto first = static_cast<float>(1000 * k);
      const auto& [name, count] = sizes[k];
      EXPECT_EQ(StoredElements(step, name, "weight"), Counted(first, count));
      EXPECT_EQ(StoredElements(step, name, "exp_avg"), Counted(first + 0.5f, count));
      EXPECT_EQ(StoredElements(step, name, "exp_avg_sq"), Counted(first + 0.25f, count));
    }
    EXPECT_EQ(StoredElements(step, "seen", "weight"), (std::vector<float>{1, 2}));
    const auto seen = *step.FindParameter("seen");
    EXPECT_NE(step.parameter(seen).role, Role::kTrainable);
    EXPECT_EQ(step.atom(*step.FindAtom(seen, "weight")).source.gathers.size(), 2u);
  }
}

// Four ranks, of which two and two share two of the tensors, too: body's rows, head's columns.
TEST(RankShardsOfAMesh, TensorParallelismAndFsdp2AreUndone) {
  const FamilySet families = ShippedFamilies().value();
  SourceOptions options;
  options.families = &families;
  for (const std::string torch : {"torch_2_7", "torch_2_13"}) {
    const auto read = IngestPlace(*PlaceOf(CKPTFS_TEST_DATA "/golden/rank_shards/" + torch + "_tp"),
                                  MakeSources(), options);
    ASSERT_TRUE(read) << read.error().message;
    const StepModel& step = read->steps.at(0).model;
    EXPECT_EQ(StoredElements(step, "embed.weight", "weight"), Counted(0, 28)) << torch;
    EXPECT_EQ(StoredElements(step, "body.weight", "weight"), Counted(1000, 32)) << torch;
    EXPECT_EQ(StoredElements(step, "head.weight", "weight"), Counted(2000, 32)) << torch;
    EXPECT_EQ(StoredElements(step, "head.weight", "exp_avg"), Counted(2000.5f, 32)) << torch;
    // Each tensor-parallel rank has all of the embedding, and a part of the body.
    const auto copies = [&](std::string_view name) {
      const auto atom = *step.FindAtom(*step.FindParameter(name), "weight");
      return step.atom(atom).source.gathers.size();
    };
    EXPECT_EQ(copies("embed.weight"), 2u);
    EXPECT_EQ(copies("body.weight"), 1u);
  }
}

TEST_P(RankShardsTest, WhatIsMissingIsNamed) {
  files::remove(File("optim", 0));
  EXPECT_THAT(Refusal(actor_), HasSubstr("no optim_world_size_2_rank_0.pt"));
  options_.weights_only = true;
  EXPECT_EQ(Refusal(actor_), "taken");
  files::remove(File("model", 1));
  EXPECT_THAT(Refusal(step_), HasSubstr("no model_world_size_2_rank_1.pt"));
}

TEST_P(RankShardsTest, ExchangedNamesAreRefused) {
  for (const char* kind : {"model", "optim"}) {
    files::rename(File(kind, 0), actor_ + "/aside");
    files::rename(File(kind, 1), File(kind, 0));
    files::rename(actor_ + "/aside", File(kind, 1));
  }
  EXPECT_THAT(Refusal(actor_), HasSubstr("rank"));
}

TEST_P(RankShardsTest, AnotherWorldSizeInTheConfigIsRefused) {
  std::ofstream(actor_ + "/fsdp_config.json") << R"({"FSDP_version": 2, "world_size": 4})";
  EXPECT_THAT(Refusal(actor_), HasSubstr("world size of 4"));
}

// Shapes prove these three, since each has its own; without the config there is no rule.
TEST_P(RankShardsTest, WithoutAConfigShapesTellTheOptimizer) {
  files::remove(actor_ + "/fsdp_config.json");
  const auto read = Ingest(actor_);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(StoredElements(read->steps[0].model, "head.weight", "exp_avg"), Counted(2000.5f, 12));
}

TEST_P(RankShardsTest, TheFirstModelIsTheStepsAndOthersAreNamed) {
  files::copy(actor_, step_ + "/critic", files::copy_options::recursive);
  const auto read = Ingest(step_);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->steps[0].model.left_out.size(), 1u);
  EXPECT_EQ(read->steps[0].model.left_out[0].what, "'critic/'");
  const auto critic = Ingest(step_ + "/critic");
  ASSERT_TRUE(critic) << critic.error().message;
  EXPECT_EQ(critic->steps[0].model.id, "critic");
  EXPECT_EQ(critic->steps[0].model.iteration, 3u);
}

TEST_P(RankShardsTest, TheTrackerSealsAStep) {
  const std::string tracker = directory_.path() + "/run/latest_checkpointed_iteration.txt";
  const auto now = files::file_time_type::clock::now();
  files::last_write_time(tracker, now + std::chrono::seconds(1));
  EXPECT_EQ(State(step_).phase, SavePhase::kSealed);
  EXPECT_THAT(State(step_).last, HasSubstr("latest_checkpointed_iteration.txt"));
  std::ofstream(tracker) << "2";  // that of the step before
  files::last_write_time(tracker, now + std::chrono::seconds(1));
  EXPECT_EQ(State(step_).phase, SavePhase::kProvisional);
  files::remove(tracker);
  EXPECT_EQ(State(step_).phase, SavePhase::kProvisional);
  std::ofstream(directory_.path() + "/run/latest_ckpt_global_step.txt") << "3\n";
  files::last_write_time(directory_.path() + "/run/latest_ckpt_global_step.txt",
                         now + std::chrono::seconds(1));
  EXPECT_EQ(State(step_).phase, SavePhase::kSealed);
}

INSTANTIATE_TEST_SUITE_P(Torch, RankShardsTest, testing::Values("torch_2_7", "torch_2_13"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace ckptfs
