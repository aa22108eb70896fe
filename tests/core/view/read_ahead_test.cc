// SPDX-License-Identifier: Apache-2.0

#include "core/view/read_ahead.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "core/view/plan_reader.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kRows = 9 * 1024;  // of 1,024 fp32: 4 KiB each, 36 MiB
constexpr uint64_t kColumns = 1024;

class ReadAheadTest : public testing::Test {
 protected:
  ReadAheadTest() {
    model_.roots = {directory_.path()};
    model_.parameters.resize(1);
    for (const char* name : {"a", "b"}) {
      Blob blob;
      blob.path = std::string(name);
      blob.stamp = *StampOfFile(directory_.Write(name, std::string(kRows * kColumns * 4, '\1')));
      model_.blobs.push_back(blob);
      Evict(PathOf(name));
    }
    Atom atom;
    atom.kind = std::string("master");
    atom.shape = {kRows, kColumns};
    for (const uint32_t blob : {0u, 1u}) {
      Gather gather;
      gather.locals = {WholeTensor(atom.shape)};
      FragmentSeries series;
      series.count = 1;
      series.elements = kRows * kColumns;
      series.blob = blob;
      gather.series = {series};
      atom.source.gathers.push_back(gather);
    }
    atom.source.kind = SourceKind::kReplicas;
    model_.atoms.push_back(atom);
    // The right half of every row, as bf16: a row is 1 KiB of the file.
    LocalTensor half;
    half.shape = {kRows, kColumns / 2};
    half.pieces = {Piece{half.shape, {0, kColumns / 2}, 0, {kColumns / 2, 1}}};
    PlanBuilder builder;
    builder.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(half), 0, kRows * kColumns / 2,
                 DType::kBF16);
    builder.BlobRange(BlobIndex{1}, 7 * kMiB, kMiB);
    plan_ = std::move(builder).Finish();
    blobs_ = BlobReader::Create(model_, {});
  }

  void SetUp() override {
    ASSERT_TRUE(plan_.Validate(model_));
    if (Cached(0, 0) || Cached(1, 0)) GTEST_SKIP() << "this filesystem keeps its pages";
  }

  std::string PathOf(const std::string& name) { return directory_.path() + "/" + name; }
  static void Evict(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
  bool Cached(uint32_t blob, uint64_t offset) {
    return blobs_->Resident(**blobs_->Hold(BlobIndex{blob}), offset);
  }
  // True once all of [begin, end) is in the page cache.
  bool Arrives(uint32_t blob, uint64_t begin, uint64_t end) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (begin < end && std::chrono::steady_clock::now() < deadline) {
      if (Cached(blob, begin)) {
        begin += 4096;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return begin >= end;
  }

  TemporaryDirectory directory_;
  StepModel model_;
  Plan plan_;
  std::unique_ptr<BlobReader> blobs_;
};

TEST_F(ReadAheadTest, AsksForWhatARangeIsGatheredFrom) {
  ReadAhead(plan_, model_, *blobs_, 2 * kMiB, kMiB);
  EXPECT_TRUE(Arrives(0, 8 * kMiB, 12 * kMiB));
  EXPECT_FALSE(Cached(0, 0));
  EXPECT_FALSE(Cached(0, 8 * kMiB - 4096));
  EXPECT_FALSE(Cached(0, 12 * kMiB));
  EXPECT_FALSE(Cached(1, 8 * kMiB));  // the second replica is not read
}

TEST_F(ReadAheadTest, AnAverageNeedsEverySlice) {
  model_.atoms[0].source.kind = SourceKind::kAverage;
  ReadAhead(plan_, model_, *blobs_, 2 * kMiB, kMiB);
  EXPECT_TRUE(Arrives(0, 8 * kMiB, 12 * kMiB));
  EXPECT_TRUE(Arrives(1, 8 * kMiB, 12 * kMiB));
}

TEST_F(ReadAheadTest, GoesOnIntoTheNextSegmentAndEndsWithTheFile) {
  ReadAhead(plan_, model_, *blobs_, plan_.size() - kMiB - 1024, 100 * kMiB);
  EXPECT_TRUE(Arrives(0, (kRows - 1) * 4096, kRows * 4096));
  EXPECT_TRUE(Arrives(1, 7 * kMiB, 8 * kMiB));
  EXPECT_FALSE(Cached(1, 8 * kMiB));
  ReadAhead(plan_, model_, *blobs_, plan_.size(), kMiB);
  ReadAhead(plan_, model_, *blobs_, ~uint64_t{0}, ~uint64_t{0});
}

TEST_F(ReadAheadTest, WhoReadsMuchAtOnceIsReadAheadFor) {
  PlanBuilder builder;
  builder.BlobRange(BlobIndex{0}, 0, kRows * kColumns * 4);
  const Plan whole = std::move(builder).Finish();
  const PlanReader reader(whole, model_, *blobs_);
  std::vector<std::byte> out(512 << 10);
  ASSERT_TRUE(reader.Read(0, std::span(out).first(4096)));
  EXPECT_FALSE(Cached(0, 32 * kMiB));
  ASSERT_TRUE(reader.Read(4096, out));
  EXPECT_TRUE(Arrives(0, 32 * kMiB + 4096, 32 * kMiB + 4096 + out.size()));
}

TEST_F(ReadAheadTest, AMissingSourceIsTheReadersToReport) {
  ASSERT_EQ(unlink(PathOf("a").c_str()), 0);
  const auto fresh = BlobReader::Create(model_, {});
  ReadAhead(plan_, model_, *fresh, 0, kMiB);
  const PlanReader reader(plan_, model_, *fresh);
  std::vector<std::byte> out(kMiB);
  EXPECT_EQ(reader.Read(0, out).error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace ckptfs
