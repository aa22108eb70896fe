// SPDX-License-Identifier: Apache-2.0
//
// Reads of files that cannot be mapped: the same bytes as of mapped ones, by few
// requests, and nothing twice.

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "core/io/file_root.h"
#include "core/view/plan_reader.h"
#include "tests/core/view/random_case.h"
#include "tests/support/slow_root.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

std::string ReadPart(const PlanReader& reader, uint64_t offset, uint64_t length) {
  std::string out(length, '\xaa');
  const auto read = reader.Read(offset, std::as_writable_bytes(std::span(out)));
  if (!read) return "error: " + read.error().message;
  out.resize(*read);
  return out;
}

std::shared_ptr<SlowRoot> SlowRootAt(const std::string& directory,
                                     std::chrono::microseconds latency, uint64_t together = 0) {
  return std::make_shared<SlowRoot>(std::make_shared<FileRoot>(directory),
                                    SlowRoot::Line{latency, 1e10, together});
}

BlobReader::Options Far(const StepModel& model, uint64_t block) {
  BlobReader::Options options;
  BlockCache::Options cache;
  cache.block = block;
  cache.in_flight = 4;
  options.cache = std::make_shared<BlockCache>(cache);
  for (const std::string& root : model.roots) {
    options.open_roots[root] = SlowRootAt(root, std::chrono::microseconds(0));
  }
  return options;
}

class FarLayouts : public testing::TestWithParam<int> {};

// Blocks of 16 to 79 bytes: runs end in them, elements lie across their borders.
TEST_P(FarLayouts, EqualTheOracle) {
  for (int i = 0; i < 40; ++i) {
    const uint64_t seed =
        500'000 + static_cast<uint64_t>(GetParam()) * 1000 + static_cast<uint64_t>(i);
    const RandomCase test_case(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << test_case.Describe());
    const auto blobs =
        BlobReader::Create(test_case.model(), Far(test_case.model(), 16 + seed % 64));
    const PlanReader reader(test_case.plan(), test_case.model(), *blobs);
    const std::string& expected = test_case.expected();
    ASSERT_TRUE(ReadPart(reader, 0, expected.size() + 10) == expected);
    std::mt19937_64 random(seed);
    for (int k = 0; k < 10; ++k) {
      const uint64_t offset = random() % (expected.size() + 1);
      const uint64_t length = random() % (random() % 2 == 0 ? 40 : expected.size() + 1);
      ASSERT_TRUE(ReadPart(reader, offset, length) == expected.substr(offset, length))
          << offset << " + " << length;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, FarLayouts, testing::Range(0, 4));

// An fp32 matrix in one file, of which eight ranks hold a slice of the columns
// each (512 bytes of every row of 4 KiB), as bf16.
class FarRanks : public testing::Test {
 protected:
  static constexpr uint64_t kRows = 4096;
  static constexpr uint64_t kColumns = 1024;
  static constexpr uint64_t kRanks = 8;

  FarRanks() {
    std::string bytes(kRows * kColumns * 4, '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 24);
    Blob blob;
    blob.path = std::string("source.bin");
    blob.stamp = *StampOfFile(directory_.Write(blob.path, bytes));
    model_.roots = {directory_.path()};
    model_.blobs = {blob};
    model_.parameters.resize(1);
    Atom atom;
    atom.shape = {kRows, kColumns};
    Gather gather;
    gather.locals = {WholeTensor(atom.shape)};
    FragmentSeries series;
    series.count = 1;
    series.elements = kRows * kColumns;
    gather.series = {series};
    atom.source.gathers = {gather};
    model_.atoms = {atom};
    constexpr uint64_t kWidth = kColumns / kRanks;
    for (uint64_t rank = 0; rank < kRanks; ++rank) {
      const LocalTensor slice{{kRows, kWidth},
                              {Piece{{kRows, kWidth}, {0, rank * kWidth}, 0, {kWidth, 1}, 1.0}}};
      PlanBuilder builder;
      builder.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(slice), 0, kRows * kWidth,
                   DType::kBF16);
      plans_.push_back(std::move(builder).Finish());
    }
    near_ = BlobReader::Create(model_, {});
    OpenFar();
  }
  void OpenFar(uint64_t together = 0) {
    slow_ = SlowRootAt(directory_.path(), std::chrono::milliseconds(2), together);
    BlobReader::Options options;
    options.open_roots[directory_.path()] = slow_;
    far_ = BlobReader::Create(model_, options);
  }

  TemporaryDirectory directory_;
  StepModel model_;
  std::vector<Plan> plans_;
  std::shared_ptr<SlowRoot> slow_;
  std::unique_ptr<BlobReader> far_, near_;
};

TEST_F(FarRanks, SixteenReadersOfSiblingsFetchNothingTwice) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (size_t t = 0; t < 16; ++t) {
    readers.emplace_back([&, t] {
      const Plan& plan = plans_[t % kRanks];
      const PlanReader far(plan, model_, *far_), near(plan, model_, *near_);
      for (uint64_t at = 0; at < plan.size(); at += 256 << 10) {
        if (ReadPart(far, at, 256 << 10) != ReadPart(near, at, 256 << 10)) ++wrong;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(slow_->counts().bytes, kRows * kColumns * 4);
  EXPECT_EQ(slow_->counts().most_reads_of_a_byte, 1u);
}

TEST_F(FarRanks, ABulkReadHasItsRequestsInFlightTogether) {
  OpenFar(8);
  const PlanReader reader(plans_[0], model_, *far_);
  std::string out(plans_[0].size(), '?');
  ASSERT_TRUE(reader.ReadParallel(0, std::as_writable_bytes(std::span(out))));
  EXPECT_EQ(out, ReadPart(PlanReader(plans_[0], model_, *near_), 0, out.size()));
  EXPECT_GE(slow_->counts().most_in_flight, 8u);
  EXPECT_LE(slow_->counts().requests, 20u);  // 16 MiB by 1 MiB, and some cut by two readers
}

TEST_F(FarRanks, ASmallReadFetchesWhatItNeedsOnly) {
  const PlanReader reader(plans_[3], model_, *far_);
  ReadPart(reader, 1000, 100);
  EXPECT_EQ(slow_->counts().bytes, 64u << 10);
}

TEST_F(FarRanks, AFileThatChangedIsStale) {
  directory_.Write("source.bin", "other");
  const PlanReader reader(plans_[0], model_, *far_);
  EXPECT_NE(ReadPart(reader, 0, 100).find("changed since it was adopted"), std::string::npos);
}

}  // namespace
}  // namespace ckptfs
