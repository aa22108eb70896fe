// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/state/assembler.h"
#include "formats/megatron/legacy/expert_parts.h"
#include "formats/megatron/legacy/local_names.h"
#include "formats/megatron/legacy/rank_places.h"

namespace ckptfs::megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(RankPlacesTest, FoldersAreNamedByDegreesAboveOne) {
  JobDegrees job;
  job.etp = job.tp = 2;
  EXPECT_EQ(FolderOf(job, {1, 0, 0, 0}), "mp_rank_01");
  job.pp = 3;
  EXPECT_EQ(FolderOf(job, {1, 2, 0, 0}), "mp_rank_01_002");
  job.ep = 4;
  EXPECT_EQ(FolderOf(job, {1, 2, 3, 1}), "mp_rank_01_002_003");
  job.pp = 1;
  EXPECT_EQ(FolderOf(job, {120, 0, 3, 0}), "mp_rank_120_003");
  for (const char* name : {"mp_rank_00", "mp_rank_120_003", "mp_rank_00_001_002"}) {
    EXPECT_TRUE(IsRankFolder(name)) << name;
  }
  for (const char* name : {"mp_rank_", "mp_rank_a", "mp_rank_00_", "mp_rank_00_1_2_3",
                           "mp_rank_00_model_states.pt", "mp_rank_0000000001", "rank_00"}) {
    EXPECT_FALSE(IsRankFolder(name)) << name;
  }
}

TEST(RankPlacesTest, RanksOfExpertsRegroupThoseOfAStage) {
  JobDegrees job;
  job.tp = job.etp = job.ep = 2;
  const auto all = PlacesOfJob(job);
  ASSERT_TRUE(all);
  EXPECT_THAT(*all, ElementsAre(RankPlace{0, 0, 0, 0}, RankPlace{1, 0, 0, 1}, RankPlace{0, 0, 1, 0},
                                RankPlace{1, 0, 1, 1}));
  job.etp = 1;  // experts are not cut: two ranks hold all of the model
  const auto few = PlacesOfJob(job);
  ASSERT_TRUE(few);
  EXPECT_THAT(*few, ElementsAre(RankPlace{0, 0, 0, 0}, RankPlace{1, 0, 1, 0}));
}

TEST(RankPlacesTest, RanksThatWriteOneFileAreRefused) {
  JobDegrees job;
  job.etp = 4;
  job.ep = job.tp = 2;
  const auto places = PlacesOfJob(job);
  ASSERT_FALSE(places);
  EXPECT_EQ(places.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(places.error().message, HasSubstr("write one file, mp_rank_00_000"));
  job = {};
  job.tp = job.etp = job.pp = 1 << 15;
  EXPECT_THAT(PlacesOfJob(job).error().message, HasSubstr("more than 65536"));
}

RankChunk ChunkOf(const std::vector<std::string>& names) {
  RankChunk out;
  for (const std::string& name : names) {
    const TensorNode node{.storage_key = "0", .storage_elements = 1, .shape = {1}, .strides = {1}};
    PickleBuilder builder;
    const NodeId root = builder.Tensor(node);
    const TorchFile file =
        TorchFile::Make(std::move(builder).Finish(root), {{"0", {0, 4}}}).value();
    out.tensors.push_back({name, file.Locate(node, BlobIndex{}).value()});
  }
  return out;
}

TEST(LocalNamesTest, NormsOfTheLocalSpecificationAreNamedAsTheyAreSaved) {
  const LocalNames local(ChunkOf({"decoder.layers.0.input_layernorm.weight",
                                  "decoder.layers.0.self_attention.linear_qkv.weight"}),
                         6);
  EXPECT_EQ(local.Of("decoder.layers.0.input_layernorm.bias").name,
            "decoder.layers.6.self_attention.linear_qkv.layer_norm_bias");
  EXPECT_EQ(local.Of("decoder.layers.0.pre_mlp_layernorm.weight").name,
            "decoder.layers.6.mlp.linear_fc1.layer_norm_weight");
  EXPECT_EQ(local.Of("decoder.layers.0.mlp.linear_fc1.weight").name,
            "decoder.layers.6.mlp.linear_fc1.weight");
  EXPECT_EQ(local.Of("embedding.word_embeddings.weight").name, "embedding.word_embeddings.weight");
  // Transformer Engine's layers have fused norms; the one before experts is their own.
  const LocalNames engine(ChunkOf({"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
                                   "decoder.layers.0.self_attention.linear_qkv.weight",
                                   "decoder.layers.0.pre_mlp_layernorm.weight"}),
                          2);
  EXPECT_EQ(engine.Of("decoder.layers.0.pre_mlp_layernorm.weight").name,
            "decoder.layers.2.pre_mlp_layernorm.weight");
  // Latent attention has a norm of its own under this name, too.
  const LocalNames latent(ChunkOf({"decoder.layers.0.input_layernorm.weight",
                                   "decoder.layers.0.self_attention.linear_q_proj.weight"}),
                          0);
  EXPECT_EQ(latent.Of("decoder.layers.0.input_layernorm.weight").name,
            "decoder.layers.0.input_layernorm.weight");
}

TEST(LocalNamesTest, ExpertsOfALayerAreOneTensor) {
  const LocalNames names(RankChunk{}, 0);
  const std::string of = "decoder.layers.3.mlp.experts.";
  const std::string first = of + "experts.linear_fc1.weight";
  LocalName one = names.Of(of + "local_experts.2.linear_fc1.weight");
  EXPECT_EQ(one.name, first);
  EXPECT_EQ(one.form, LocalName::Form::kExpert);
  EXPECT_EQ(one.expert, 2u);
  EXPECT_FALSE(one.second || one.bias);
  one = names.Of(of + "linear_fc1.weight12");
  EXPECT_EQ(one.name, first);
  EXPECT_EQ(one.expert, 12u);
  one = names.Of(of + "linear_fc2.bias0");
  EXPECT_TRUE(one.second && one.bias);
  one = names.Of(of + "weight1");
  EXPECT_EQ(one.name, first);
  EXPECT_EQ(one.form, LocalName::Form::kGrouped);
  EXPECT_TRUE(names.Of(of + "weight2").second);
  for (const char* other : {"local_experts.x.linear_fc1.weight", "linear_fc1.weight01", "weight3",
                            "local_experts.99999999999.linear_fc1.weight"}) {
    EXPECT_EQ(names.Of(of + other).form, LocalName::Form::kPlain) << other;
  }
  EXPECT_EQ(names.Of("decoder.layers.3.mlp.shared_experts.linear_fc1.weight").form,
            LocalName::Form::kPlain);
}

// Where each element of a rank's tensor lies in the tensor of all experts.
std::vector<uint64_t> PlacesIn(const ExpertPart& part) {
  std::vector<uint64_t> out(RowMajorStrides(part.local.shape)[0] * part.local.shape[0], ~0ull);
  const std::vector<uint64_t> whole = RowMajorStrides(part.whole);
  for (const Piece& piece : part.local.pieces) {
    for (uint64_t e = 0; e < piece.shape[0]; ++e) {
      for (uint64_t r = 0; r < piece.shape[1]; ++r) {
        for (uint64_t c = 0; c < piece.shape[2]; ++c) {
          const uint64_t at = piece.local_offset + e * piece.local_strides[0] +
                              r * piece.local_strides[1] + c * piece.local_strides[2];
          out.at(at) = (piece.atom_begin[0] + e) * whole[0] + (piece.atom_begin[1] + r) * whole[1] +
                       (piece.atom_begin[2] + c) * whole[2];
        }
      }
    }
  }
  return out;
}

LocalName Expert(uint32_t number, bool second) {
  return {"", LocalName::Form::kExpert, number, second, false};
}

TEST(ExpertPartsTest, GateAndUpAreCutApart) {
  const ExpertCut cut{4, 2, 2, true};
  // Expert 3 is local expert 1 of expert rank 1: four rows of three columns of tensor rank 1.
  const auto part = ExpertPartOf(cut, Expert(1, false), {1, 0, 1, 1}, {4, 3});
  ASSERT_TRUE(part);
  EXPECT_EQ(part->whole, (Shape{4, 8, 3}));
  EXPECT_EQ(part->first, 3u);
  std::vector<uint64_t> want;
  for (const uint64_t row : {2, 3, 6, 7}) {
    for (uint64_t c = 0; c < 3; ++c) want.push_back(3 * 24 + row * 3 + c);
  }
  EXPECT_EQ(PlacesIn(*part), want);
  EXPECT_FALSE(ExpertPartOf(cut, Expert(1, false), {1, 0, 1, 1}, {3, 3}));
}

TEST(ExpertPartsTest, SecondLayersAreCutByColumnsAndTheirBiasesAreCopies) {
  const ExpertCut cut{2, 1, 2, false};
  const auto part = ExpertPartOf(cut, Expert(0, true), {1, 0, 1, 1}, {2, 2});
  ASSERT_TRUE(part);
  EXPECT_EQ(part->whole, (Shape{2, 2, 4}));
  EXPECT_THAT(PlacesIn(*part), ElementsAre(8 + 2, 8 + 3, 8 + 6, 8 + 7));
  LocalName bias = Expert(0, true);
  bias.bias = true;
  const auto copy = ExpertPartOf(cut, bias, {1, 0, 1, 1}, {5});
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->whole, (Shape{2, 5}));
  EXPECT_TRUE(copy->replicated);
}

TEST(ExpertPartsTest, GroupedExpertsAreTransposed) {
  const ExpertCut cut{2, 2, 1, false};
  const LocalName first{"", LocalName::Form::kGrouped, 0, false, false};
  // [hidden 2, 2 experts x 3 rows], computed with as [2 experts, hidden 2, 3 rows].
  const auto one = ExpertPartOf(cut, first, {}, {2, 6});
  ASSERT_TRUE(one);
  EXPECT_EQ(one->whole, (Shape{2, 3, 2}));
  EXPECT_THAT(PlacesIn(*one), ElementsAre(0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11));
  const LocalName second{"", LocalName::Form::kGrouped, 0, true, false};
  // [2 experts x 3 columns, hidden 2]
  const auto two = ExpertPartOf(cut, second, {}, {6, 2});
  ASSERT_TRUE(two);
  EXPECT_EQ(two->whole, (Shape{2, 2, 3}));
  EXPECT_THAT(PlacesIn(*two), ElementsAre(0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11));
  EXPECT_FALSE(ExpertPartOf(cut, first, {}, {2, 5}));
  EXPECT_FALSE(ExpertPartOf(cut, first, {}, {2, 3, 2}));
}

}  // namespace
}  // namespace ckptfs::megatron
