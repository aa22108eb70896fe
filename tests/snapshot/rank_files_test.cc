// SPDX-License-Identifier: Apache-2.0
#include "formats/snapshot/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "formats/families/shipped.h"
#include "snapshot/capture.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

// The empty dict, in protocol 2.
const std::string kEmptyDict("\x80\x02}.", 4);
// {"num_attention_heads": 4}
const std::string kArgs("\x80\x02}X\x13\x00\x00\x00num_attention_headsK\x04s.", 31);
const std::string kZeros(1 << 16, '\0');

CapturedTensor StateOf(std::string parameter, std::string kind, Shape shape,
                       DType dtype = DType::kF32) {
  CapturedTensor tensor;
  tensor.parameter = std::move(parameter);
  tensor.kind = std::move(kind);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.from = reinterpret_cast<const std::byte*>(kZeros.data());
  return tensor;
}

CapturedTensor Pickle(const std::string& key, const std::string& bytes) {
  CapturedTensor tensor = StateOf("", "", {bytes.size()}, DType::kU8);
  tensor.key = key;
  tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
  return tensor;
}

constexpr const char* kQuery = "model.layers.0.self_attn.q_proj.weight";

// A world of two: rank 0 has the weights, rank 1 the moments.
std::vector<Capture> SampleRanks() {
  std::vector<Capture> ranks(2);
  for (Capture& rank : ranks) rank.step = 7;
  ranks[0].tensors = {StateOf(kQuery, "weight", {8, 4}),
                      StateOf("model.norm.weight", "weight", {4}), Pickle("g", kEmptyDict),
                      Pickle("d", kArgs)};
  ranks[0].parameters = {{kQuery, "trainable"}, {"model.norm.weight", "frozen"}};
  ranks[0].aliases = {{"second", "model.norm.weight"}};
  ranks[0].groups = {{"", {kQuery}, "g"}};
  ranks[0].documents = {{"args", "", "d", {}}};
  ranks[1].tensors = {StateOf(kQuery, "exp_avg", {8, 4}), StateOf(kQuery, "step", {})};
  return ranks;
}

Result<StepModel> Read(std::vector<Capture> ranks, uint32_t world = 2) {
  auto root = std::make_shared<MemoryRoot>("memory");
  std::vector<std::string> paths;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    auto file = CaptureFile::Make(std::move(ranks[rank]), rank, world);
    EXPECT_TRUE(file);
    auto bytes = std::make_shared<std::string>(file->bytes(), '\0');
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
        std::memcpy(bytes->data() + run.at, run.from, run.bytes);
      }
    }
    paths.push_back(StrCat("d/", rank));
    EXPECT_TRUE(root->Add(paths.back(), {std::as_bytes(std::span(*bytes))}, bytes, {}));
  }
  const FamilySet families = *ShippedFamilies();
  SourceOptions options;
  options.families = &families;
  return ReadRankFiles(root, paths, options);
}

TEST(RankFilesTest, TheRanksFilesMakeOneModel) {
  const auto model = Read(SampleRanks());
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->id, "7");
  EXPECT_EQ(model->iteration, 7u);
  EXPECT_EQ(model->layout.dp, 2u);
  EXPECT_EQ(model->family, "llama");
  ASSERT_EQ(model->parameters.size(), 2u);
  EXPECT_EQ(model->parameters[0].name, kQuery);
  EXPECT_EQ(model->parameters[0].pattern.kind, PatternKind::kShard);
  EXPECT_EQ(model->parameters[0].pattern.cuts[0].unit, 2u);  // 8 rows, 4 heads
  EXPECT_EQ(model->parameters[1].role, Role::kFrozen);
  EXPECT_EQ(model->atoms.size(), 4u);
  const auto step = model->FindAtom(ParameterIndex{0}, "step");
  ASSERT_TRUE(step);
  EXPECT_EQ(model->atom(*step).relation, Relation::kScalar);
  EXPECT_EQ(model->atom(*step).source.inline_bytes, std::string(4, '\0'));
  EXPECT_TRUE(model->FindParameter("second"));
  EXPECT_EQ(model->groups.size(), 1u);
  EXPECT_NE(model->FindDocument("args"), nullptr);
}

std::string Refusal(const std::function<void(std::vector<Capture>&)>& edit, uint32_t world = 2) {
  std::vector<Capture> ranks = SampleRanks();
  edit(ranks);
  const auto model = Read(std::move(ranks), world);
  return model ? "none" : model.error().message;
}

TEST(RankFilesTest, WhatIsMissingDoubleOrContradictoryIsRefused) {
  EXPECT_THAT(Refusal([](auto& r) { r[0].tensors.erase(r[0].tensors.begin()); }),
              HasSubstr("no rank holds the weight"));
  EXPECT_THAT(Refusal([](auto& r) { r[1].tensors.push_back(r[0].tensors[0]); }),
              HasSubstr("two ranks hold"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].tensors.push_back(r[1].tensors[0]); }),
              HasSubstr("held twice"));
  EXPECT_THAT(Refusal([](auto& r) { r[1].step = 8; }), HasSubstr("of step 8"));
  EXPECT_THAT(Refusal([](auto& r) { r.pop_back(); }), HasSubstr("of rank 0 of 2, not of 0 of 1"));
  EXPECT_THAT(Refusal([](auto&) {}, 3), HasSubstr("of rank 0 of 3"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].parameters[0].role = "queen"; }),
              HasSubstr("'queen' is not a role"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].parameters.pop_back(); }), HasSubstr("does not declare"));
  EXPECT_THAT(Refusal([](auto& r) { r[1].parameters = r[0].parameters; }),
              HasSubstr("rank 0's to describe"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].groups[0].parameters = {"x"}; }), HasSubstr("'x'"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].groups[0].pickle = "d"; }), HasSubstr("mentioned twice"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].documents.clear(); }),
              HasSubstr("nothing says what tensor 'd' is"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].documents[0].tensors = {"nowhere"}; }),
              HasSubstr("'nowhere'"));
  EXPECT_THAT(Refusal([](auto& r) {
                r[0].aliases = {{kQuery, "model.norm.weight"}};
              }),
              HasSubstr("an alias"));
}

TEST(RankFilesTest, PicklesAreReadAsData) {
  static const std::string kBad = "\x80\x02}";
  static const std::string kList("\x80\x02].", 4);
  static const std::string kTensor(
      "\x80\x02X\x01\x00\x00\x00"
      "5Q.",
      10);  // persistent id "5"
  const auto with = [](size_t which, const std::string& bytes) {
    return Refusal([&](auto& r) {
      CapturedTensor& tensor = r[0].tensors[which];
      tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
      tensor.shape = {bytes.size()};
    });
  };
  EXPECT_THAT(with(2, kBad), HasSubstr("g"));
  EXPECT_THAT(with(2, kList), HasSubstr("not a dict"));
  EXPECT_THAT(with(3, kBad), HasSubstr("d"));
  EXPECT_THAT(with(3, kTensor), HasSubstr("no tensor '5'"));
}

}  // namespace
}  // namespace ckptfs
