// SPDX-License-Identifier: Apache-2.0
#include "formats/rank_file/deepspeed_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "formats/families/shipped.h"
#include "formats/rank_file/rank_files.h"
#include "formats/torch/pickle_writer.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

constexpr const char* kFile = "mp_rank_00_model_states.pt";
constexpr uint64_t kElements = 12;
const std::string kWeight(kElements * 4, 'w');

TensorNode WeightNode() {
  TensorNode node;
  node.storage_class = "FloatStorage";
  node.storage_key = "module/w";
  node.storage_elements = kElements;
  node.shape = {3, 4};
  node.strides = {4, 1};
  return node;
}

// The states of two data-parallel ranks without ZeRO: {"module": {"w": ..}, ..}.
const std::string& ModelStates() {
  static const std::string text = [] {
    PickleBuilder pickle;
    const NodeId name = pickle.String("w");
    const NodeId module = pickle.Dict({{name, pickle.Tensor(WeightNode())}});
    const NodeId keys[] = {pickle.String("module"), pickle.String("dp_world_size"),
                           pickle.String("mp_world_size"), pickle.String("global_steps")};
    const NodeId two = pickle.Int(2);
    const NodeId one = pickle.Int(1);
    const NodeId root =
        pickle.Dict({{keys[0], module}, {keys[1], two}, {keys[2], one}, {keys[3], pickle.Int(7)}});
    return PrintPickle(std::move(pickle).Finish(root)).value();
  }();
  return text;
}

const std::string& Text(const char* value) {
  static std::map<std::string, std::string> texts;
  PickleBuilder pickle;
  const NodeId root = pickle.String(value);
  return texts.try_emplace(value, PrintPickle(std::move(pickle).Finish(root)).value())
      .first->second;
}

CapturedTensor Keyed(std::string key, const std::string& bytes) {
  CapturedTensor tensor;
  tensor.key = std::move(key);
  tensor.dtype = DType::kU8;
  tensor.shape = {bytes.size()};
  tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
  return tensor;
}

CapturedTensor Weight() {
  CapturedTensor tensor = Keyed(StrCat(kFile, "/module/w"), kWeight);
  tensor.dtype = DType::kF32;
  tensor.shape = {3, 4};
  return tensor;
}

// Rank 0 has the pickle, rank 1 the weight.
std::vector<Capture> SampleJob() {
  std::vector<Capture> ranks(2);
  for (Capture& rank : ranks) {
    rank.step = 7;
    rank.framework = kDeepSpeedRankFile;
  }
  ranks[0].tensors = {Keyed("f", ModelStates()), Keyed("t", Text("global_step7"))};
  ranks[0].documents = {{kFile, "file", "f", {}}, {"tag", "", "t", {}}};
  ranks[1].tensors = {Weight(), Keyed("n", Text(""))};
  ranks[1].documents = {{kFile, "part", "n", {StrCat(kFile, "/module/w")}}};
  return ranks;
}

Result<StepModel> ReadJob(std::vector<Capture> ranks) {
  auto root = std::make_shared<MemoryRoot>("memory");
  std::vector<std::string> paths;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    auto file = CaptureFile::Make(std::move(ranks[rank]), rank, 2);
    EXPECT_TRUE(file);
    auto bytes = std::make_shared<std::string>(file->bytes(), '\0');
    for (const CopyRun& run : file->Runs(0, file->bytes(), false)) {
      std::memcpy(bytes->data() + run.at, run.from, run.bytes);
    }
    paths.push_back(StrCat("d/", rank));
    EXPECT_TRUE(root->Add(paths.back(), {std::as_bytes(std::span(*bytes))}, bytes, {}));
  }
  const FamilySet families = *ShippedFamilies();
  SourceOptions options;
  options.families = &families;
  return ReadRankFiles(root, paths, options);
}

TEST(DeepSpeedFilesTest, AnotherRankMayHaveAStorage) {
  const auto model = ReadJob(SampleJob());
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->framework, "deepspeed");
  EXPECT_EQ(model->id, "global_step7");
  EXPECT_EQ(model->iteration, 7u);
  ASSERT_EQ(model->parameters.size(), 1u);
  EXPECT_EQ(model->parameters[0].shape, (Shape{3, 4}));
  const auto weight = model->FindAtom(ParameterIndex{0}, "weight");
  ASSERT_TRUE(weight);
  EXPECT_EQ(model->atom(*weight).dtype, DType::kF32);
  EXPECT_EQ(model->blobs.size(), 2u);
}

std::string RefusalOf(const std::function<void(std::vector<Capture>&)>& edit) {
  std::vector<Capture> ranks = SampleJob();
  edit(ranks);
  const auto model = ReadJob(std::move(ranks));
  return model ? "none" : model.error().message;
}

TEST(DeepSpeedFilesTest, WhatDoesNotMakeACheckpointIsRefused) {
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].framework = "torch"; }), HasSubstr("not a rank of a "
                                                                              "DeepSpeed job"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[0].documents[0].scope = "part"; }),
              HasSubstr("no rank has its pickle"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].documents[0].scope = "file"; }),
              HasSubstr("ranks 0 and 1 both have"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].documents[0].scope = "dp1"; }), HasSubstr("scope"));
  EXPECT_THAT(RefusalOf([](auto& r) {
                r[0].tensors.push_back(Weight());
                r[0].documents[0].tensors = {Weight().key};
              }),
              HasSubstr("ranks 0 and 1 both have storage"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].documents[0].key = "mp_rank_01_model_states.pt"; }),
              HasSubstr("does not belong to 'mp_rank_01_model_states.pt'"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].tensors[0].dtype = DType::kI32; }),
              HasSubstr("is int32 of 48 bytes, but the pickle says fp32"));
  EXPECT_THAT(RefusalOf([](auto& r) { r[1].tensors[0].shape = {3, 3}; }), HasSubstr("36 bytes"));
  EXPECT_THAT(RefusalOf([](auto& r) {
                r[1].tensors.erase(r[1].tensors.begin());
                r[1].documents[0].tensors.clear();
              }),
              HasSubstr("no such record"));
}

TEST(DeepSpeedFilesTest, TheTagIsTheNameOfADirectory) {
  EXPECT_THAT(RefusalOf([](auto& r) {
                r[0].tensors.pop_back();
                r[0].documents.pop_back();
              }),
              HasSubstr("does not name the tag"));
  for (const char* tag : {"..", "", "a/b"}) {
    EXPECT_THAT(RefusalOf([&](auto& r) { r[0].tensors[1] = Keyed("t", Text(tag)); }),
                HasSubstr("not a directory's name"));
  }
  static const std::string cut("\x80\x02");
  EXPECT_THAT(RefusalOf([](auto& r) { r[0].tensors[1] = Keyed("t", cut); }), HasSubstr("t: "));
}

}  // namespace
}  // namespace ckptfs
