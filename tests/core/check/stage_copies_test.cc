// SPDX-License-Identifier: Apache-2.0

#include "core/check/stage_copies.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kLength = 5000;  // more than one sample

// A tied module's parameter on three stages: a master and a moment, each in three files.
class StageCopiesTest : public testing::Test {
 protected:
  StageCopiesTest() {
    model_.roots = {directory_.path()};
    model_.parameters.resize(1);
    model_.parameters[0].name = std::string("tied_modules.embed.bias");
  }

  // One value a stage, which all elements of its copy have.
  void Add(const std::string& kind, std::array<float, 3> values) {
    Atom atom;
    atom.kind = kind;
    atom.shape = {kLength};
    atom.source.kind = SourceKind::kReplicas;
    for (size_t stage = 0; stage < values.size(); ++stage) {
      Gather gather;
      gather.locals = {WholeTensor(atom.shape)};
      FragmentSeries series;
      series.elements = kLength;
      series.blob = static_cast<uint32_t>(model_.blobs.size());
      gather.series = {series};
      atom.source.gathers.push_back(gather);
      const std::vector<float> elements(kLength, values[stage]);
      const std::string name = kind + std::to_string(stage);
      const std::string path = directory_.Write(
          name, {reinterpret_cast<const char*>(elements.data()), kLength * sizeof(float)});
      model_.blobs.emplace_back();
      model_.blobs.back().path = name;
      model_.blobs.back().stamp = *StampOfFile(path);
    }
    model_.atoms.push_back(std::move(atom));
  }

  Result<std::vector<std::string>> Run() {
    const std::vector<ParameterIndex> several{ParameterIndex{0}};
    const auto blobs = BlobReader::Create(model_, {});
    return KeepTrainedCopies(model_, several, *blobs);
  }

  // The blob of an atom's only copy.
  uint32_t OnlyBlob(size_t atom) const {
    const AtomSource& source = model_.atoms[atom].source;
    EXPECT_EQ(source.kind, SourceKind::kGather);
    EXPECT_EQ(source.gathers.size(), 1u);
    const Gather& gather = source.gathers.front();
    return gather.series[0].blob;
  }

  TemporaryDirectory directory_;
  StepModel model_;
};

TEST_F(StageCopiesTest, EqualCopiesStay) {
  Add("master", {1, 1, 1});
  Add("exp_avg", {2, 2, 2});
  const auto changed = Run();
  ASSERT_TRUE(changed) << changed.error().message;
  EXPECT_TRUE(changed->empty());
  EXPECT_EQ(model_.atoms[0].source.gathers.size(), 3u);
}

TEST_F(StageCopiesTest, TheTrainedCopyAloneStays) {
  Add("master", {1, 1, 3});
  Add("exp_avg", {0, 0, 2});
  const auto changed = Run();
  ASSERT_TRUE(changed) << changed.error().message;
  ASSERT_EQ(changed->size(), 1u);
  EXPECT_EQ(OnlyBlob(0), 2u);
  EXPECT_EQ(OnlyBlob(1), 5u);
}

TEST_F(StageCopiesTest, ACopyOfWhichOnlyTheMomentsDifferIsNoticed) {
  Add("master", {1, 1, 1});
  Add("exp_avg", {0, 2, 0});
  const auto changed = Run();
  ASSERT_TRUE(changed) << changed.error().message;
  EXPECT_EQ(OnlyBlob(1), 4u);
}

TEST_F(StageCopiesTest, TwoThatWereTrainedApartAreRefused) {
  Add("master", {1, 2, 3});
  Add("exp_avg", {0, 2, 2});
  const auto changed = Run();
  ASSERT_FALSE(changed);
  EXPECT_EQ(changed.error().code, ErrorCode::kInvalid);
  EXPECT_EQ(changed.error().parameter, "tied_modules.embed.bias");
}

TEST_F(StageCopiesTest, WithoutMomentsNothingTells) {
  Add("weight", {1, 1, 3});
  EXPECT_FALSE(Run());
}

TEST_F(StageCopiesTest, AWeightThatStandsAloneIsTheMasters) {
  Add("master", {1, 1, 3});
  Add("exp_avg", {0, 0, 2});
  Add("weight", {1, 1, 1});
  AtomSource& weight = model_.atoms[2].source;
  weight.gathers.resize(1);
  weight.kind = SourceKind::kGather;
  ASSERT_TRUE(Run());
  EXPECT_EQ(model_.atoms[2].source.kind, SourceKind::kCast);
  EXPECT_EQ(model_.atoms[2].source.of, AtomIndex{0});
}

}  // namespace
}  // namespace ckptfs
