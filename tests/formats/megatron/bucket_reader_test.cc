// SPDX-License-Identifier: Apache-2.0
//
// Buffers of DistributedOptimizer in directories that a test writes: two tensor-parallel ranks, one
// stage of two layers, fp32 weights, which are their own masters.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/adopt/scan.h"
#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/view/source_runs.h"
#include "formats/families/shipped.h"
#include "formats/megatron/source.h"
#include "tests/formats/dcp/dcp_maker.h"
#include "tests/formats/megatron/first_left_out.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::megatron {
namespace {

using dcp::DcpMaker;
using testing::HasSubstr;
using Floats = std::vector<float>;

constexpr const char* kDataFile = "__0_0.distcp";
constexpr const char* kBucket =
    "optimizer.distributed.dp_group_idx_%.gbuf_idx_0.dtype_(torch.float32, "
    "torch.float32).bucket_idx_0.";

std::string With(std::string text, const std::string& what, const std::string& by) {
  return text.replace(text.find(what), what.size(), by);
}

class BucketReaderTest : public testing::Test {
 protected:
  BucketReaderTest() : source_(MakeMegatronSource()), families_(ShippedFamilies().value()) {
    options_.families = &families_;
    for (const int layer : {0, 1}) {
      norms_[layer] = Floats(4, 1.0F + static_cast<float>(layer));
      for (const int rank : {0, 1}) weights_[layer][rank] = Ramp(100 * layer + 10 * rank, 8);
    }
  }
  static Floats Ramp(int first, size_t count) {
    Floats out(count);
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(first) + static_cast<float>(i);
    return out;
  }

  void AddChunks(const std::string& key, const Shape& shape,
                 const std::vector<std::pair<Shape, Floats>>& chunks, const Shape& sizes) {
    dcp::MadeEntry entry{key, {}, true, "float32", shape, {}};
    for (const auto& [offsets, values] : chunks) {
      const Shape of = sizes.empty() ? Shape{values.size()} : sizes;
      entry.chunks.push_back(made_.Place({offsets, of, kDataFile}, dcp::ArchiveOf(of, values)));
    }
    made_.entries.push_back(std::move(entry));
  }
  void AddObject(const std::string& name, const std::function<NodeId(PickleBuilder&)>& make) {
    PickleBuilder b;
    const NodeId root = b.List({make(b)});
    made_.AddObject(name, dcp::ObjectArchive(std::move(b).Finish(root)), kDataFile);
  }
  static NodeId Dict(PickleBuilder& b, std::vector<std::pair<std::string, NodeId>> items) {
    std::vector<std::pair<NodeId, NodeId>> out;
    for (auto& [key, value] : items) out.emplace_back(b.String(key), value);
    return b.Dict(out);
  }

  // A bucket of a rank: the layers' weights and norms from the last to the first, each a chunk.
  void AddBucket(int rank) {
    std::vector<std::pair<Shape, Floats>> chunks;
    uint64_t at = 0;
    const auto add = [&](const Floats& values) {
      const uint64_t begin = AlignUp(at, 64);
      if (begin > at) chunks.push_back({Shape{at}, Floats(begin - at, -1)});
      chunks.push_back({Shape{begin}, values});
      at = begin + values.size();
    };
    for (const int layer : {1, 0}) {
      add(masters_.contains({layer, rank}) ? masters_[{layer, rank}] : weights_[layer][rank]);
      add(norms_[layer]);
    }
    for (int i = 0; i < finals_; ++i) add(final_);
    const std::string key = With(kBucket, "%", std::to_string(rank));
    for (const char* kind : {"param", "exp_avg"}) {
      if (kind == missing_) continue;
      AddChunks(key + kind, {at}, chunks, {});
    }
    const std::string group =
        With("optimizer.distributed.dp_group_idx_%.", "%", std::to_string(rank));
    for (const std::string what : {"per_bucket_numel", "per_bucket_numel_unpadded"}) {
      const auto size = static_cast<int64_t>(what == "per_bucket_numel" ? AlignUp(at, 128) : at);
      if (what == missing_) continue;
      AddObject(group + what + "/shard_0_1", [&](PickleBuilder& b) {
        const NodeId sizes = b.List({b.Int(size + more_)});
        return b.List({b.Dict({{b.String("dtypes"), sizes}})});
      });
    }
    AddObject(group + "optimizer/shard_0_1", [&](PickleBuilder& b) {
      const NodeId rate = b.Float(rank == 1 ? rate_ : 0.5);
      const NodeId group_dict = Dict(b, {{"lr", rate}, {"step", b.Int(3)}});
      return Dict(b, {{"param_groups", b.List({group_dict})}});
    });
  }

  Result<StepModel> Read() {
    std::vector<std::pair<Shape, Floats>> weights, norms;
    const uint64_t rows = weights_[0][0].size();
    for (const uint64_t layer : {0, 1}) {
      norms.push_back({{layer, 0}, norms_[layer]});
      for (const uint64_t rank : {0, 1}) {
        weights.push_back({{layer, rank * rows}, weights_[layer][rank]});
      }
    }
    AddChunks("decoder.layers.self_attention.linear_qkv.bias", {2, 2 * rows}, weights, {1, rows});
    AddChunks("decoder.layers.self_attention.linear_qkv.layer_norm_weight", {2, 4}, norms, {1, 4});
    AddChunks("decoder.final_layernorm.weight", {final_.size()}, {{{0}, final_}}, {});
    for (const int rank : {0, 1}) AddBucket(rank);
    AddObject("common_state/shard_0_1", [&](PickleBuilder& b) {
      const NodeId args = Dict(b, {{"tensor_model_parallel_size", b.Int(tp_)},
                                   {"pipeline_model_parallel_size", b.Int(1)},
                                   {"world_size", b.Int(4)}});
      return Dict(b, {{"args", args}, {"iteration", b.Int(9)}});
    });
    for (const auto& [name, bytes] : made_.files) directory_.Write("iter_0000009/" + name, bytes);
    directory_.Write("iter_0000009/.metadata", made_.Metadata());
    directory_.Write("iter_0000009/metadata.json",
                     R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})");
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(directory_.path()));
    CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(place.root, place.directory));
    return source_->Read(found.at(0), options_);
  }
  // Why the optimizer is left out; "" if it is not.
  std::string LeftOutFor() {
    const auto step = Read();
    if (!step) return "refused: " + step.error().message;
    const LeftOut* left = FirstLeftOut(*step, LeftOutPart::kOptimizer);
    EXPECT_EQ(left != nullptr, step->FindParameter(kBias) && !Has(*step, "master"));
    return left == nullptr ? "" : left->why;
  }
  static bool Has(const StepModel& step, const char* kind) {
    return step.FindAtom(*step.FindParameter(kBias), kind).has_value();
  }

  static constexpr const char* kBias = "decoder.layers.1.self_attention.linear_qkv.bias";
  TemporaryDirectory directory_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
  DcpMaker made_;
  std::map<int, Floats> norms_;
  std::map<int, std::map<int, Floats>> weights_;
  std::map<std::pair<int, int>, Floats> masters_;  // where they are not the weights
  Floats final_ = Floats(4, 5);
  int finals_ = 1;  // how often a rank has it
  std::string missing_;
  int64_t more_ = 0;
  int64_t tp_ = 2;
  double rate_ = 0.5;
};

TEST_F(BucketReaderTest, StatesAreThoseOfTheirParameters) {
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_EQ(FirstLeftOut(*step, LeftOutPart::kOptimizer), nullptr);
  const auto bias = step->FindParameter(kBias);
  const auto master = step->FindAtom(*bias, "master");
  ASSERT_TRUE(master.has_value());
  const AtomSource& source = step->atom(*master).source;
  ASSERT_EQ(source.gathers.size(), 1u);
  EXPECT_EQ(source.gathers[0].locals.size(), 2u);  // of two ranks
  const auto norm =
      step->FindParameter("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(step->atom(*step->FindAtom(*norm, "exp_avg")).source.gathers.size(), 2u);
  EXPECT_EQ(step->atom(*step->FindAtom(*norm, "exp_avg")).source.kind, SourceKind::kReplicas);
  EXPECT_TRUE(step->FindAtom(*bias, "step").has_value());
  EXPECT_EQ(step->groups.size(), 1u);
}

TEST_F(BucketReaderTest, WhatElseTheOptimizerHasIsLeftOutByName) {
  AddObject("optimizer.distributed.dp_group_idx_0.grad_scaler/shard_0_1", [](PickleBuilder& b) {
    return Dict(b, {{"scale", b.Float(2)}});
  });
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_TRUE(Has(*step, "master"));
  const LeftOut* left = FirstLeftOut(*step, LeftOutPart::kDocument);
  ASSERT_NE(left, nullptr);
  EXPECT_THAT(left->what, HasSubstr("'grad_scaler' of the optimizer"));
}

TEST_F(BucketReaderTest, AMasterThatIsNotTheWeightIsRefused) {
  masters_[{0, 1}] = weights_[0][1];
  masters_[{0, 1}].back() += 1;
  EXPECT_THAT(LeftOutFor(), HasSubstr("at element 128 no parameter of the rank begins"));
}

TEST_F(BucketReaderTest, SwappedMastersContradictTheOrder) {
  masters_[{0, 1}] = weights_[1][1];
  masters_[{1, 1}] = weights_[0][1];
  EXPECT_NE(LeftOutFor(), "");
}

TEST_F(BucketReaderTest, OtherRanksMastersAreNotThisRanks) {
  masters_[{0, 0}] = weights_[0][1];
  masters_[{0, 1}] = weights_[0][0];
  EXPECT_THAT(LeftOutFor(), HasSubstr("no parameter of the rank"));
}

TEST_F(BucketReaderTest, TwoOfZerosAreLeftOut) {
  for (const int layer : {0, 1}) {
    for (const int rank : {0, 1}) weights_[layer][rank] = Floats(4, 0);
    norms_[layer] = Floats(4, 0);
  }
  EXPECT_THAT(LeftOutFor(), HasSubstr("same values"));
}

// 5,000 elements, of which only one differs, that no sample has.
TEST_F(BucketReaderTest, WhatSamplesDoNotTellApartIsReadWhole) {
  for (const int layer : {0, 1}) {
    for (const int rank : {0, 1}) {
      weights_[layer][rank] = Floats(5000, 1);
      weights_[layer][rank][300 + 2 * layer + rank] = 2;
    }
  }
  EXPECT_EQ(LeftOutFor(), "");
}

TEST_F(BucketReaderTest, WhatIsTheSameInAllIsLeftOutThen) {
  for (const int layer : {0, 1}) {
    for (const int rank : {0, 1}) weights_[layer][rank] = Floats(5000, 1);
    norms_[layer] = Floats(4, 1);
  }
  EXPECT_NE(LeftOutFor(), "");
}

TEST_F(BucketReaderTest, ATensorOfUnknownRanksMayBeTheOwnerOfAnyPlace) {
  AddChunks("decoder.other", {3}, {{{0}, {1}}, {{1}, {1}}, {{2}, {1}}}, {});
  EXPECT_THAT(LeftOutFor(), HasSubstr("the chunks of 'decoder.other' do not tell"));
}

TEST_F(BucketReaderTest, ATensorThatRanksHoldTwiceIsRefused) {
  finals_ = 2;
  EXPECT_THAT(LeftOutFor(), HasSubstr("is not held by exactly the ranks that have it"));
}

TEST_F(BucketReaderTest, ATensorThatNobodyHasIsNotTrained) {
  finals_ = 0;
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  const auto norm = step->FindParameter("decoder.final_layernorm.weight");
  EXPECT_FALSE(step->FindAtom(*norm, "master").has_value());
  EXPECT_EQ(step->parameter(*norm).role, Role::kFrozen);
  EXPECT_TRUE(Has(*step, "master"));
}

TEST_F(BucketReaderTest, OtherArgumentsAreRefused) {
  tp_ = 1;
  EXPECT_THAT(LeftOutFor(), HasSubstr("buffers of 2 groups of ranks"));
}

TEST_F(BucketReaderTest, SizesThatAreNotSaidOrOthersAreRefused) {
  missing_ = "per_bucket_numel";
  EXPECT_THAT(LeftOutFor(), HasSubstr("does not say the size of every bucket"));
}

TEST_F(BucketReaderTest, ABucketOfAnotherSizeIsRefused) {
  more_ = 64;
  EXPECT_THAT(LeftOutFor(), HasSubstr("elements, but its group of ranks says"));
}

TEST_F(BucketReaderTest, WithoutMastersNothingIsProved) {
  missing_ = "param";
  EXPECT_THAT(LeftOutFor(), HasSubstr("the masters of the parameters"));
}

TEST_F(BucketReaderTest, RanksOfDifferentHyperParametersLeaveSeveralWays) {
  rate_ = 0.25;
  const auto step = Read();
  ASSERT_TRUE(step.has_value()) << step.error().message;
  EXPECT_TRUE(Has(*step, "master"));
  EXPECT_TRUE(step->groups.empty());
  EXPECT_THAT(FirstLeftOut(*step, LeftOutPart::kOptimizer)->why, HasSubstr("several ways"));
}

}  // namespace
}  // namespace ckptfs::megatron
