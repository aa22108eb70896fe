// SPDX-License-Identifier: Apache-2.0

#include "core/check/weight_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/check/verify.h"
#include "core/tensor/cast.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kWeightElements = 3000;  // of a parameter
constexpr uint32_t kRanks = 3;

// Parameters of one shape: fp32 masters over three ranks' files, one parameter
// after the other, and bf16 weights in one more file.
class WeightCheckTest : public testing::Test {
 protected:
  WeightCheckTest() {
    model_.roots = {directory_.path()};
    files_.resize(kRanks + 1);
    for (uint32_t i = 0; i < 4; ++i) AddParameter(i);
    WriteAll();
  }

  void AddParameter(uint32_t number) {
    Parameter parameter;
    parameter.name = "layers." + std::to_string(number) + ".weight";
    parameter.shape = {kWeightElements / 10, 10};
    model_.parameters.push_back(parameter);
    std::vector<float> values(kWeightElements);
    for (uint64_t i = 0; i < kWeightElements; ++i) {
      values[i] = static_cast<float>(std::sin(static_cast<double>(number * kWeightElements + i)));
    }
    AddMaster(number, values);
    AddWeight(number, values);
  }
  void AddMaster(uint32_t number, const std::vector<float>& values) {
    Atom atom = NewAtom(number, "master", DType::kF32);
    FragmentSeries series;
    series.count = kRanks;
    series.elements = series.flat_step = kWeightElements / kRanks;
    series.blob_step = 1;
    series.offset = files_[0].size();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      files_[rank].append(reinterpret_cast<const char*>(&values[rank * series.elements]),
                          series.elements * sizeof(float));
    }
    atom.source.gathers[0].series = {series};
    model_.atoms.push_back(atom);
  }
  void AddWeight(uint32_t number, const std::vector<float>& values) {
    Atom atom = NewAtom(number, "weight", DType::kBF16);
    FragmentSeries series;
    series.elements = kWeightElements;
    series.blob = kRanks;
    series.offset = files_[kRanks].size();
    series.dtype = DType::kBF16;
    atom.source.gathers[0].series = {series};
    model_.atoms.push_back(atom);
    std::string bytes(kWeightElements * 2, '\0');
    FindCast(DType::kF32, DType::kBF16)(reinterpret_cast<const std::byte*>(values.data()),
                                        reinterpret_cast<std::byte*>(bytes.data()),
                                        kWeightElements);
    files_[kRanks] += bytes;
  }
  Atom NewAtom(uint32_t number, const char* kind, DType dtype) {
    Atom atom;
    atom.parameter = ParameterIndex{number};
    atom.kind = kind;
    atom.dtype = dtype;
    atom.shape = model_.parameters[number].shape;
    atom.source.gathers = {Gather{{WholeTensor(atom.shape)}, {}}};
    return atom;
  }
  void WriteAll() {
    model_.blobs.resize(files_.size());
    for (size_t i = 0; i < files_.size(); ++i) {
      model_.blobs[i].path = i < kRanks ? "rank" + std::to_string(i) : "weights";
      const std::string path = directory_.Write(model_.blobs[i].path, files_[i]);
      model_.blobs[i].stamp = *StampOfFile(path);
    }
    model_.BuildIndex();
  }

  // Returns what the sample says; `verify` must say it of at least one parameter.
  std::string Sampled() {
    const auto checked = CheckWeightSample(model_, *BlobReader::Create(model_, {}));
    const VerifyReport report = Verified();
    EXPECT_EQ(checked.has_value(), report.defect_count == 0);
    if (checked) return "equal";
    EXPECT_EQ(checked.error().code, ErrorCode::kDataLoss);
    EXPECT_FALSE(report.defects.empty());
    return checked.error().message;
  }
  VerifyReport Verified() {
    const auto blobs = BlobReader::Create(model_, {});
    const auto report = VerifyStep(model_, *blobs, {});
    EXPECT_TRUE(report);
    return *report;
  }
  bool Has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  TemporaryDirectory directory_;
  StepModel model_;
  std::vector<std::string> files_;
};

TEST_F(WeightCheckTest, AGoodStepIsEqual) {
  const auto checked = CheckWeightSample(model_, *BlobReader::Create(model_, {}));
  ASSERT_TRUE(checked);
  EXPECT_EQ(*checked, 4 * kRanks * 128u);
  const VerifyReport report = Verified();
  EXPECT_EQ(report.weights_compared, 4u);
  EXPECT_EQ(report.defect_count, 0u);
  EXPECT_EQ(report.atoms_read, 0u);  // all were, by the comparison
}

TEST_F(WeightCheckTest, ExchangedRankFilesAreNamed) {
  std::swap(files_[0], files_[2]);
  WriteAll();
  const std::string text = Sampled();
  EXPECT_TRUE(Has(text, "parameter 'layers.")) << text;
  EXPECT_TRUE(Has(text, "element ")) << text;
  EXPECT_TRUE(Has(text, directory_.path() + "/weights")) << text;
  EXPECT_TRUE(Has(text, directory_.path() + "/rank")) << text;
  const VerifyReport report = Verified();
  EXPECT_EQ(report.defect_count, 4u);
  EXPECT_TRUE(Has(report.defects[0].rule, "; 20"))
      << report.defects[0].rule;  // of 3,000 in two files
}

TEST_F(WeightCheckTest, AFileThatIsThereTwiceIsNamed) {
  files_[1] = files_[2];
  WriteAll();
  EXPECT_TRUE(Has(Sampled(), directory_.path() + "/rank1"));
}

TEST_F(WeightCheckTest, NamesOnTheBytesOfAnotherAreNamed) {
  std::swap(model_.atoms[2].source.gathers, model_.atoms[4].source.gathers);  // masters of 1, 2
  const std::string text = Sampled();
  EXPECT_TRUE(Has(text, "layers.1.weight") || Has(text, "layers.2.weight")) << text;
  EXPECT_EQ(Verified().defect_count, 2u);
}

TEST_F(WeightCheckTest, OneElementIsFoundByVerify) {
  files_[1][0] = static_cast<char>(files_[1][0] ^ 0x40);  // within the rounding
  files_[2][999 * 4 + 3] = static_cast<char>(files_[2][999 * 4 + 3] ^ 0x40);
  WriteAll();
  EXPECT_TRUE(CheckWeightSample(model_, *BlobReader::Create(model_, {})));
  const VerifyReport report = Verified();
  ASSERT_EQ(report.defect_count, 1u);
  EXPECT_EQ(report.defects[0].subject, "layers.0.weight (weight)");
  EXPECT_TRUE(Has(report.defects[0].rule, "element 2999 is ")) << report.defects[0].rule;
  EXPECT_TRUE(Has(report.defects[0].rule, "; 1 elements differ")) << report.defects[0].rule;
}

TEST_F(WeightCheckTest, ASourceThatChangedIsNotJudged) {
  directory_.Write("rank0", "short");
  const auto checked = CheckWeightSample(model_, *BlobReader::Create(model_, {}));
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, ErrorCode::kStale);
}

// A mean of casts is not a cast of the mean, but copy by copy they are.
TEST_F(WeightCheckTest, AveragesAreComparedCopyByCopyOrNotAtAll) {
  for (const size_t i : {0u, 1u}) {
    AtomSource& source = model_.atoms[i].source;
    const size_t other = i + 2;
    source.kind = SourceKind::kAverage;
    source.gathers.push_back(model_.atoms[other].source.gathers[0]);
  }
  EXPECT_EQ(Sampled(), "equal");
  model_.atoms[0].source.gathers.pop_back();
  EXPECT_EQ(Sampled(), "equal");
  const VerifyReport report = Verified();
  EXPECT_EQ(report.weights_compared, 3u);
  EXPECT_EQ(report.weights_skipped, 1u);
  EXPECT_EQ(report.skipped, "layers.0.weight (weight)");
}

// Only the first copies are compared where there are not as many of both.
TEST_F(WeightCheckTest, ReplicasNeedNoPartner) {
  AtomSource& master = model_.atoms[0].source;
  master.kind = SourceKind::kReplicas;
  master.gathers.push_back(master.gathers[0]);
  EXPECT_EQ(Sampled(), "equal");
  std::swap(files_[0], files_[2]);
  WriteAll();
  EXPECT_NE(Sampled(), "equal");
}

TEST_F(WeightCheckTest, TheSampleIsBounded) {
  for (uint32_t i = 4; i < 3000; ++i) {
    model_.parameters.push_back(model_.parameters[0]);
    model_.parameters.back().name = std::to_string(i);
    for (const size_t atom : {0, 1}) {
      model_.atoms.push_back(model_.atoms[atom]);
      model_.atoms.back().parameter = ParameterIndex{i};
    }
  }
  model_.BuildIndex();
  EXPECT_EQ(*CheckWeightSample(model_, *BlobReader::Create(model_, {})),
            8192u * 128u);  // of 9,000 runs
}

TEST(FindDifferenceTest, WhatProcessorsMayDoIsNoDifference) {
  const auto bytes = [](const auto& values) { return std::as_bytes(std::span(values)); };
  const uint32_t a[] = {0x7fc00000, 0x00000001, 0x80000000, 0x3f800000, 0x00800000};
  const uint32_t b[] = {0xff800001, 0x80000000, 0x00000000, 0x3f800000, 0x00000000};
  const Difference floats = FindDifference(DType::kF32, bytes(a), bytes(b));
  EXPECT_EQ(floats.count, 1u);  // a normal number is not flushed
  EXPECT_EQ(floats.first, 4u);
  const uint16_t c[] = {0x0001, 0x7c00, 0x8000, 0x7e00};
  const uint16_t d[] = {0x0000, 0x7c01, 0x0000, 0x7c01};
  const Difference halves = FindDifference(DType::kF16, bytes(c), bytes(d));
  EXPECT_EQ(halves.count, 2u);  // fp16 has subnormals everywhere; infinity is not NaN
  EXPECT_EQ(halves.first, 0u);
}

TEST(AtomElementTest, FollowsThePieces) {
  LocalTensor local;  // the right half of [4, 6], a row of padding behind it
  local.shape = {5, 3};
  local.pieces = {Piece{{4, 3}, {0, 3}, 0, {3, 1}, 1.0}};
  EXPECT_EQ(AtomElement(local, {4, 6}, 0), 3u);
  EXPECT_EQ(AtomElement(local, {4, 6}, 11), 23u);
  EXPECT_EQ(AtomElement(local, {4, 6}, 12), std::nullopt);
}

}  // namespace
}  // namespace ckptfs
