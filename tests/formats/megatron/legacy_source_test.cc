// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <utility>

#include "core/adopt/scan.h"
#include "formats/families/shipped.h"
#include "formats/megatron/legacy/source.h"
#include "formats/registry.h"
#include "tests/formats/megatron/legacy_maker.h"
#include "tests/support/stored_elements.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::megatron {
namespace {

namespace files = std::filesystem;
using testing::HasSubstr;

constexpr const char* kEmbedding = "embedding.word_embeddings.weight";
constexpr const char* kOutput = "output_layer.weight";

// A model of two layers, in two stages of two tensor ranks.
class LegacySourceTest : public testing::Test {
 protected:
  LegacySourceTest() : families_(ShippedFamilies().value()) {
    options_.families = &families_;
    for (int tp = 0; tp < 2; ++tp) {
      for (int pp = 0; pp < 2; ++pp) ranks_[{tp, pp}] = Rank(tp, pp);
    }
  }

  static MadeRank Rank(int tp, int pp) {
    MadeRank out;
    out.args = {{"tensor_model_parallel_size", 2},
                {"pipeline_model_parallel_size", 2},
                {"num_layers", 2},
                {"num_attention_heads", 2},
                {"world_size", 4},
                {"rank", pp * 2 + tp}};
    out.flags = {{"untie_embeddings_and_output_weights", true}};
    if (pp == 0) out.model.push_back({kEmbedding, {4, 2}, static_cast<float>(8 * tp)});
    const float first = static_cast<float>(100 + 100 * pp + 8 * tp);
    out.model.push_back({"decoder.layers.0.mlp.linear_fc1.weight", {4, 2}, first});
    out.model.push_back({"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", {2}, 50});
    out.model.push_back({"decoder.layers.0.mlp.linear_fc2.weight", {2, 4}, 60});
    if (pp == 1) out.model.push_back({kOutput, {4, 2}, static_cast<float>(500 + 8 * tp)});
    return out;
  }

  std::string Write() {
    const std::string step = directory_.path() + "/run/iter_0000003";
    for (const auto& [place, rank] : ranks_) {
      const std::string folder =
          step + "/mp_rank_0" + std::to_string(place.first) + "_00" + std::to_string(place.second);
      files::create_directories(folder);
      std::ofstream(folder + "/model_optim_rng.pt", std::ios::binary) << FileOf(rank);
    }
    std::ofstream(directory_.path() + "/run/latest_checkpointed_iteration.txt") << "3";
    return step;
  }
  Result<IngestResult> Ingest(const std::string& path) {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
    return IngestPlace(place, sources_, options_);
  }
  std::string Refusal() {
    const auto read = Ingest(Write());
    return read ? "taken" : read.error().message;
  }

  TemporaryDirectory directory_;
  FamilySet families_;
  SourceOptions options_;
  std::map<std::pair<int, int>, MadeRank> ranks_;
  const std::vector<std::unique_ptr<Source>> sources_ = MakeSources();
};

TEST_F(LegacySourceTest, LayersOfStagesHaveTheModelsNumbers) {
  Write();
  const auto read = Ingest(directory_.path() + "/run");
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->steps.size(), 1u);
  const StepModel& step = read->steps[0].model;
  EXPECT_EQ(step.framework, "megatron_legacy");
  EXPECT_EQ(step.id, "iter_0000003");
  EXPECT_EQ(step.iteration, 3u);
  EXPECT_EQ(step.layout.ToString(), "tp2_pp2");
  EXPECT_EQ(StoredElements(step, kEmbedding, "weight"), CountedFrom(0, {16}));
  EXPECT_EQ(StoredElements(step, "decoder.layers.0.mlp.linear_fc1.weight", "weight"),
            CountedFrom(100, {16}));
  EXPECT_EQ(StoredElements(step, "decoder.layers.1.mlp.linear_fc1.weight", "weight"),
            CountedFrom(200, {16}));
  EXPECT_EQ(StoredElements(step, kOutput, "weight"), CountedFrom(500, {16}));
  const auto norm = *step.FindParameter("decoder.layers.1.mlp.linear_fc1.layer_norm_weight");
  EXPECT_EQ(step.atom(*step.FindAtom(norm, "weight")).source.gathers.size(), 2u);
}

TEST_F(LegacySourceTest, WhatIsMissingIsNamed) {
  ranks_.erase({1, 1});
  EXPECT_THAT(Refusal(), HasSubstr("no mp_rank_01_001/model_optim_rng.pt"));
}

TEST_F(LegacySourceTest, RanksOfSeveralSavesAreRefused) {
  ranks_[{1, 1}].iteration = 4;
  EXPECT_THAT(Refusal(), HasSubstr("mp_rank_01_001/model_optim_rng.pt: its 'iteration'"));
  ranks_[{1, 1}] = Rank(1, 1);
  ranks_[{1, 1}].args["num_attention_heads"] = 4;
  EXPECT_THAT(Refusal(), HasSubstr("another num_attention_heads"));
  ranks_[{1, 1}] = Rank(1, 1);
  std::swap(ranks_[{0, 0}], ranks_[{1, 0}]);
  EXPECT_THAT(Refusal(), HasSubstr("its args say that rank 1 wrote it"));
}

// A converter writes the files of all ranks as one.
TEST_F(LegacySourceTest, OneWriterOfAllTellsNothing) {
  for (auto& [place, rank] : ranks_) rank.args["rank"] = 0;
  EXPECT_EQ(Refusal(), "taken");
}

TEST_F(LegacySourceTest, ArgumentsThatAreMissingAreNamed) {
  const auto without = [&](const char* name) {
    for (auto& [place, rank] : ranks_) {
      rank = Rank(place.first, place.second);
      rank.args.erase(name);
      rank.flags.erase(name);
    }
    return Refusal();
  };
  EXPECT_THAT(without("tensor_model_parallel_size"), HasSubstr("do not say tensor_model_parallel"));
  EXPECT_THAT(without("num_layers"), HasSubstr("do not say num_layers"));
  EXPECT_THAT(without("untie_embeddings_and_output_weights"), HasSubstr("is the embedding"));
}

TEST_F(LegacySourceTest, ATiedOutputLayerIsTheEmbedding) {
  for (auto& [place, rank] : ranks_) {
    rank.flags["untie_embeddings_and_output_weights"] = false;
    if (place.second == 1) rank.model.back().first = static_cast<float>(8 * place.first);
  }
  const auto read = Ingest(Write());
  ASSERT_TRUE(read) << read.error().message;
  const StepModel& step = read->steps[0].model;
  EXPECT_FALSE(step.FindParameter(kOutput));
  const auto weight = *step.FindAtom(*step.FindParameter(kEmbedding), "weight");
  EXPECT_EQ(step.atom(weight).source.gathers.size(), 2u);  // verify compares them
}

TEST_F(LegacySourceTest, OtherModelsAreRefusedByName) {
  ranks_[{0, 0}].version = 1.0;
  EXPECT_THAT(Refusal(), HasSubstr("checkpoint_version"));
  ranks_[{0, 0}] = Rank(0, 0);
  ranks_[{0, 0}].model_key = "model0";
  EXPECT_THAT(Refusal(), HasSubstr("there is no 'model'"));
  for (auto& [place, rank] : ranks_) {
    rank = Rank(place.first, place.second);
    rank.args["pipeline_model_parallel_split_rank"] = 1;
  }
  EXPECT_THAT(Refusal(), HasSubstr("an encoder and a decoder"));
}

TEST_F(LegacySourceTest, StagesMustHaveTheLayersThatArgumentsSay) {
  for (auto& [place, rank] : ranks_) rank.args["num_layers"] = 3;
  EXPECT_THAT(Refusal(), HasSubstr("2 layers together, but args say num_layers 3"));
  const auto longer = [&](int more) {
    for (auto& [place, rank] : ranks_) {
      rank = Rank(place.first, place.second);
      rank.args["num_layers"] = 3;
      if (place.second == more) {
        rank.model.push_back({"decoder.layers.1.mlp.linear_fc1.weight", {4, 2}, 700});
        rank.model.push_back({"decoder.layers.1.mlp.linear_fc1.layer_norm_weight", {2}, 50});
      }
    }
  };
  longer(1);
  EXPECT_THAT(Refusal(), HasSubstr("stages are uneven"));
  longer(1);
  for (auto& [place, rank] : ranks_) rank.args["decoder_first_pipeline_num_layers"] = 1;
  EXPECT_EQ(Refusal(), "taken");
  longer(0);
  for (auto& [place, rank] : ranks_) rank.args["decoder_first_pipeline_num_layers"] = 1;
  EXPECT_THAT(Refusal(), HasSubstr("decoder_first_pipeline_num_layers 1"));
  longer(1);
  ranks_[{1, 1}].model.pop_back();
  ranks_[{1, 1}].model.pop_back();
  for (auto& [place, rank] : ranks_) rank.args["decoder_first_pipeline_num_layers"] = 1;
  EXPECT_THAT(Refusal(), HasSubstr("mp_rank_01_001: it has 1 layers"));
}

// Megatron writes the tracker when all ranks have their files.
TEST_F(LegacySourceTest, TheTrackerSealsAStep) {
  const std::string step = Write();
  const std::string tracker = directory_.path() + "/run/latest_checkpointed_iteration.txt";
  const auto phase = [&] {
    const auto found = Scan(*PlaceOf(directory_.path() + "/run"), sources_).value();
    return found.at(0).source->StateOf(found.at(0).candidate, options_, {}).phase;
  };
  EXPECT_EQ(phase(), SavePhase::kSealed);
  std::ofstream(tracker) << "2";  // of the step before
  EXPECT_EQ(phase(), SavePhase::kProvisional);
  std::ofstream(tracker) << "3";
  files::remove(step + "/mp_rank_01_001/model_optim_rng.pt");
  EXPECT_EQ(phase(), SavePhase::kBegun);
  files::remove_all(step + "/mp_rank_01_001");
  EXPECT_EQ(phase(), SavePhase::kBegun);
  for (auto& [place, rank] : ranks_) rank.flags["use_distributed_optimizer"] = true;
  Write();
  EXPECT_EQ(phase(), SavePhase::kBegun);
  options_.weights_only = true;
  EXPECT_EQ(phase(), SavePhase::kSealed);
}

// ---- optimizers ----------------------------------------------------------------------

// One rank of fp32 parameters; members in Megatron's order.
class LegacyOptimizerTest : public LegacySourceTest {
 protected:
  LegacyOptimizerTest() {
    rank_.args = {{"tensor_model_parallel_size", 1},
                  {"pipeline_model_parallel_size", 1},
                  {"num_layers", 1},
                  {"rank", 0}};
    rank_.model = {{kEmbedding, {8, 2}, 0},
                   {"decoder.layers.0.self_attention.linear_proj.weight", {2, 6}, 100},
                   {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", {2}, 200},
                   {"decoder.layers.0.mlp.linear_fc2.weight", {2, 4}, 300},
                   {"decoder.final_layernorm.weight", {2}, 400}};
    rank_.groups = {{0, 1, 3}, {2, 4}};
  }

  Result<IngestResult> Take(const std::optional<std::vector<float>>& flat = std::nullopt) {
    const std::string folder = directory_.path() + "/run/iter_0000003/mp_rank_00";
    files::create_directories(folder);
    rank_.flags["use_distributed_optimizer"] = flat.has_value();
    std::ofstream(folder + "/model_optim_rng.pt", std::ios::binary) << FileOf(rank_);
    if (flat) std::ofstream(folder + "/distrib_optim.pt", std::ios::binary) << FlatFileOf(*flat);
    return Ingest(directory_.path() + "/run/iter_0000003");
  }
  std::string WhyLeftOut(const std::optional<std::vector<float>>& flat = std::nullopt) {
    const auto read = Take(flat);
    if (!read) return "refused: " + read.error().message;
    for (const LeftOut& one : read->steps[0].model.left_out) {
      if (one.part == LeftOutPart::kOptimizer) return one.why;
    }
    return "taken";
  }
  // The buffer that Megatron would have: parameters in the opposite order, each at a multiple of 64
  // from the last bucket's first element.
  std::vector<float> Buffer(const std::vector<size_t>& bucket_ends = {}) const {
    std::vector<float> out;
    size_t bucket = 0;
    for (size_t i = rank_.model.size(); i-- > 0;) {
      while ((out.size() - bucket) % 64 != 0) out.push_back(0);
      const auto own = CountedFrom(rank_.model[i].first, rank_.model[i].shape);
      out.insert(out.end(), own.begin(), own.end());
      for (const size_t end : bucket_ends) bucket = end == i ? out.size() : bucket;
    }
    return out;
  }

  MadeRank rank_;
};

TEST_F(LegacyOptimizerTest, NumbersFollowGroupsAndTheOrderOfTheModule) {
  const auto read = Take();
  ASSERT_TRUE(read) << read.error().message;
  const StepModel& step = read->steps[0].model;
  EXPECT_EQ(WhyLeftOut(), "taken");
  for (const MadeTensor& one : rank_.model) {
    EXPECT_EQ(StoredElements(step, one.name, "exp_avg"), CountedFrom(one.first + 0.5f, one.shape));
    EXPECT_EQ(StoredElements(step, one.name, "master"), CountedFrom(one.first, one.shape));
  }
  ASSERT_EQ(step.groups.size(), 2u);
  EXPECT_EQ(step.groups[1].parameters.size(), 2u);
}

TEST_F(LegacyOptimizerTest, AnOrderThatShapesContradictIsLeftOut) {
  rank_.groups = {{1, 0, 3}, {2, 4}};
  EXPECT_THAT(WhyLeftOut(), HasSubstr("has the shape"));
  rank_.groups = {{0, 1, 3, 2}, {4}};
  EXPECT_THAT(WhyLeftOut(), HasSubstr("has 4 members, and Megatron's rule gives it 3"));
  // All matrices of one shape leave several ways where there are no masters.
  for (MadeTensor& one : rank_.model) {
    if (one.shape.size() == 2) one.shape = {4, 2};
  }
  rank_.groups = {{0, 1, 3}, {2, 4}};
  EXPECT_THAT(WhyLeftOut(), HasSubstr("no masters tell"));
}

TEST_F(LegacyOptimizerTest, BuffersHoldParametersInTheOppositeOrder) {
  const std::vector<float> buffer = Buffer();
  const auto read = Take(buffer);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(WhyLeftOut(buffer), "taken");
  const StepModel& step = read->steps[0].model;
  // decoder.final_layernorm, linear_fc2, layer_norm, linear_proj, the embedding
  const std::vector<std::pair<size_t, float>> begins = {
      {4, 0}, {3, 64}, {2, 128}, {1, 192}, {0, 256}};
  for (const auto& [i, begin] : begins) {
    const MadeTensor& one = rank_.model[i];
    EXPECT_EQ(StoredElements(step, one.name, "master"), CountedFrom(one.first, one.shape));
    EXPECT_EQ(StoredElements(step, one.name, "exp_avg"), CountedFrom(begin + 0.5f, one.shape));
  }
}

TEST_F(LegacyOptimizerTest, BucketsMayEndWhereArgumentsAllowIt) {
  const std::vector<float> buffer = Buffer({3, 1});
  EXPECT_EQ(WhyLeftOut(buffer), "taken");
  rank_.flags["overlap_grad_reduce"] = false;
  rank_.flags["untie_embeddings_and_output_weights"] = true;
  EXPECT_THAT(WhyLeftOut(buffer), HasSubstr("no master follows"));
  EXPECT_EQ(WhyLeftOut(Buffer()), "taken");
}

TEST_F(LegacyOptimizerTest, BuffersThatWeightsContradictAreLeftOut) {
  std::vector<float> buffer = Buffer();
  buffer[65] += 1;
  EXPECT_THAT(WhyLeftOut(buffer), HasSubstr("'decoder.layers.0.mlp.linear_fc2.weight'"));
  buffer = Buffer();
  buffer.pop_back();
  EXPECT_THAT(WhyLeftOut(buffer), HasSubstr("no master follows"));
  buffer = Buffer();
  buffer.resize(buffer.size() + 64);
  EXPECT_THAT(WhyLeftOut(buffer), HasSubstr("does not end where the buffer ends"));
  // Zeros follow zeros: the last one may begin at either place.
  for (MadeTensor& one : rank_.model) one.first = 0;
  for (MadeTensor& one : rank_.model) one.shape = {1};
  rank_.groups = {{}, {0, 1, 2, 3, 4}};
  EXPECT_THAT(WhyLeftOut(std::vector<float>(131, 0)), HasSubstr("several ways"));
}

}  // namespace
}  // namespace ckptfs::megatron
