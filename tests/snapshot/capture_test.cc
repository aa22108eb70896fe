// SPDX-License-Identifier: Apache-2.0
#include "snapshot/trainer/capture.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "core/base/strings.h"
#include "core/state/rank_file.h"

namespace ckptfs {
namespace {

CapturedTensor Tensor(std::string parameter, std::string kind, DType dtype, Shape shape,
                      const std::string& bytes, bool lazy) {
  CapturedTensor tensor;
  tensor.parameter = std::move(parameter);
  tensor.kind = std::move(kind);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
  tensor.lazy = lazy;
  return tensor;
}

// Gathers the file by its runs, in pieces of `step` bytes.
std::string Gathered(const CaptureFile& file, uint64_t step) {
  std::string bytes(file.bytes(), '?');
  std::vector<int> times(file.bytes(), 0);
  for (uint64_t begin = 0; begin < file.bytes(); begin += step) {
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file.Runs(begin, std::min(file.bytes(), begin + step), lazy)) {
        std::memcpy(bytes.data() + run.at, run.from, run.bytes);
        for (uint64_t i = 0; i < run.bytes; ++i) ++times[run.at + i];
      }
    }
  }
  for (const int count : times) EXPECT_EQ(count, 1);
  return bytes;
}

TEST(CaptureTest, ItIsAFileThatAnyoneReads) {
  const std::string weight(24, 'w');
  const std::string moment(48, 'm');
  Capture capture;
  capture.tensors = {Tensor("a", "weight", DType::kBF16, {3, 4}, weight, true),
                     Tensor("a", "exp_avg", DType::kF32, {12}, moment, false),
                     Tensor("b", "weight", DType::kF32, {0, 4}, moment, true)};
  const auto file = CaptureFile::Make(std::move(capture), 0, 1);
  ASSERT_TRUE(file) << file.error().message;
  const std::string bytes = Gathered(*file, 7);
  const auto header = ParseSafetensorsHeader(bytes, bytes.size());
  ASSERT_TRUE(header) << header.error().message;
  EXPECT_TRUE(header->metadata.contains(kRankFileKey));
  ASSERT_EQ(header->entries.size(), 3u);
  for (const SafetensorsEntry& entry : header->entries) {
    const std::string data =
        bytes.substr(header->data_offset + entry.begin, entry.end - entry.begin);
    EXPECT_EQ(data, entry.name == "a" ? weight : entry.name == "exp_avg/a" ? moment : "");
  }
}

// By key, what the file says of it and its bytes.
std::map<std::string, std::string> HeldIn(const CaptureFile& file) {
  const std::string bytes = Gathered(file, 11);
  const auto header = ParseSafetensorsHeader(bytes, bytes.size());
  EXPECT_TRUE(header) << header.error().message;
  std::map<std::string, std::string> held{{"", header->metadata.at(kRankFileKey)}};
  for (const SafetensorsEntry& entry : header->entries) {
    held[entry.name] =
        StrCat(SafetensorsName(entry.dtype), ShapeToString(entry.shape),
               bytes.substr(header->data_offset + entry.begin, entry.end - entry.begin));
    if (entry.end > entry.begin) {
      EXPECT_EQ(file.KeyAt(header->data_offset + entry.begin), entry.name);
    }
  }
  return held;
}

TEST(CaptureTest, APlannedOneHoldsWhatOneOfTensorsHolds) {
  const std::string weight(24, 'w'), moment(48, 'm'), step(8, 's'), pickle(5, 'p');
  const auto tensors = [&] {
    CapturedTensor part = Tensor("a", "exp_avg", DType::kF32, {3, 4}, moment, true);
    part.part = StatePart{{6, 4}, {{{3, 0}, {6, 4}, {0, 0}}}, std::nullopt, {}};
    return std::vector{Tensor("a", "weight", DType::kBF16, {3, 4}, weight, true), part,
                       Tensor("a", "step", DType::kF64, {}, step, false),
                       Tensor("none", "weight", DType::kF32, {0, 4}, moment, true)};
  };
  CapturedTensor text = Tensor("", "", DType::kU8, {5}, pickle, false);
  text.key = "ckptfs.group/0";
  Capture told;
  told.tensors = tensors();
  told.tensors.push_back(text);
  const auto truth = CaptureFile::Make(std::move(told), 0, 1);
  ASSERT_TRUE(truth) << truth.error().message;

  auto planned = CapturePlan::Make(tensors());
  ASSERT_TRUE(planned) << planned.error().message;
  const auto plan = std::make_shared<const CapturePlan>(*std::move(planned));
  for (int round = 0; round < 2; ++round) {  // it serves for more than one
    Capture capture;
    capture.tensors = {text};
    capture.plan = plan;
    for (const CapturedTensor& one : tensors()) capture.sources.push_back(one.from);
    const auto file = CaptureFile::Make(std::move(capture), 0, 1);
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(HeldIn(*file), HeldIn(*truth));
  }
}

TEST(CaptureTest, APlanOfOtherTensorsIsRefused) {
  const std::string bytes(4, 'x');
  auto planned = CapturePlan::Make({Tensor("a", "weight", DType::kF32, {1}, bytes, true)});
  ASSERT_TRUE(planned);
  Capture capture;
  capture.plan = std::make_shared<const CapturePlan>(*std::move(planned));
  EXPECT_FALSE(CaptureFile::Make(capture, 0, 1));
  const auto* const from = reinterpret_cast<const std::byte*>(bytes.data());
  capture.sources = {from};
  EXPECT_TRUE(CaptureFile::Make(capture, 0, 1));
  capture.tensors = {Tensor("a", "weight", DType::kF32, {1}, bytes, false)};
  const auto twice = CaptureFile::Make(capture, 0, 1);
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().message, "snapshot: there are two tensors 'a'");
}

TEST(CaptureTest, TwoTensorsOfOneNameAreRefused) {
  const std::string bytes(4, 'x');
  Capture capture;
  capture.tensors = {Tensor("a", "weight", DType::kF32, {1}, bytes, true),
                     Tensor("a", "weight", DType::kF32, {1}, bytes, true)};
  EXPECT_FALSE(CaptureFile::Make(std::move(capture), 0, 1));
}

TEST(CaptureTest, NamesAreText) {
  const std::string bytes(4, 'x');
  Capture capture;
  capture.tensors = {Tensor("\xff", "weight", DType::kF32, {1}, bytes, true)};
  EXPECT_FALSE(CaptureFile::Make(std::move(capture), 0, 1));
}

TEST(CaptureTest, PiecesOfAnySizeCoverTheFileOnce) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::string> held(random() % 6);
    Capture capture;
    for (size_t i = 0; i < held.size(); ++i) {
      const uint64_t elements = random() % 100;
      held[i].resize(elements * 4);
      for (char& byte : held[i]) byte = static_cast<char>(random());
      capture.tensors.push_back(
          Tensor(StrCat("p", i), "weight", DType::kF32, {elements}, held[i], random() % 2 == 0));
    }
    const auto file = CaptureFile::Make(std::move(capture), 0, 1);
    ASSERT_TRUE(file);
    const std::string whole = Gathered(*file, file->bytes());
    EXPECT_EQ(Gathered(*file, 1 + random() % 300), whole);
    EXPECT_TRUE(ParseSafetensorsHeader(whole, whole.size()));
  }
}

}  // namespace
}  // namespace ckptfs
