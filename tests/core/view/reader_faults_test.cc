// SPDX-License-Identifier: Apache-2.0
//
// Faults under a plan reader, and its explanations of them.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/view/plan_reader.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kElements = 1 << 18;  // 1 MiB of fp32

class ReaderFaults : public testing::Test {
 protected:
  ReaderFaults() {
    model_.roots = {directory_.path()};
    model_.parameters.resize(1);
    model_.parameters[0].name = std::string("layers.0.w");
    AddBlob("a", std::string(kElements * 4, '\1'));
    AddBlob("b", std::string(kElements * 4, '\2'));
    Atom atom;
    atom.kind = std::string("master");
    atom.shape = {2 * kElements};
    Gather gather;
    gather.locals = {WholeTensor(atom.shape)};
    FragmentSeries series;
    series.count = 2;
    series.elements = series.flat_step = kElements;
    series.blob_step = 1;
    gather.series = {series};
    atom.source.gathers = {gather};
    model_.atoms.push_back(atom);
    PlanBuilder builder;
    builder.Literal(std::string(64, 'H'));
    builder.Atom(AtomIndex{0}, std::make_shared<const LocalTensor>(WholeTensor(atom.shape)), 0,
                 2 * kElements + 4, DType::kBF16);
    plan_ = std::move(builder).Finish();
  }

  void AddBlob(const std::string& name, const std::string& bytes) {
    Blob blob;
    blob.path = name;
    blob.stamp = *StampOfFile(directory_.Write(name, bytes));
    model_.blobs.push_back(blob);
  }
  std::unique_ptr<BlobReader> Open(int interval_ms) {
    BlobReader::Options options;
    options.check_interval = std::chrono::milliseconds(interval_ms);
    return BlobReader::Create(model_, options);
  }
  std::string PathOf(const char* name) { return directory_.path() + "/" + name; }

  TemporaryDirectory directory_;
  StepModel model_;
  Plan plan_;
};

TEST_F(ReaderFaults, TruncatedUnderTheMapping) {
  const auto blobs = Open(1000000);
  const PlanReader reader(plan_, model_, *blobs);
  std::vector<std::byte> out(plan_.size());
  ASSERT_TRUE(reader.Read(0, out));
  ASSERT_EQ(truncate(PathOf("b").c_str(), 4096), 0);
  for (auto read : {reader.Read(0, out), reader.ReadParallel(0, out)}) {
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::kDataLoss);
    EXPECT_NE(read.error().message.find(PathOf("b")), std::string::npos);
    EXPECT_NE(read.error().message.find("layers.0.w (master)"), std::string::npos);
  }
  // Bytes that do not need the file are still served.
  EXPECT_TRUE(reader.Read(0, std::span(out).first(1000)));
}

TEST_F(ReaderFaults, ReplacedFilesAreStale) {
  const auto blobs = Open(0);
  const PlanReader reader(plan_, model_, *blobs);
  std::vector<std::byte> out(plan_.size());
  ASSERT_TRUE(reader.Read(0, out));
  directory_.Write("c", std::string(kElements * 4, '\3'));
  ASSERT_EQ(rename(PathOf("c").c_str(), PathOf("a").c_str()), 0);
  const auto read = reader.Read(0, out);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kStale);
  EXPECT_NE(read.error().message.find(PathOf("a")), std::string::npos);
}

// The buffer to fill may be a tmpfs file that found no room.
TEST_F(ReaderFaults, ADestinationWithoutBackingIsNotTheSourcesFault) {
  const auto blobs = Open(0);
  const PlanReader reader(plan_, model_, *blobs);
  const int fd = memfd_create("destination", 0);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  void* memory = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  const auto read = reader.Read(64, {static_cast<std::byte*>(memory), 1 << 19});
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kExhausted);
  munmap(memory, 1 << 20);
  close(fd);
}

TEST_F(ReaderFaults, FragmentsBeyondTheFile) {
  model_.atoms[0].source.gathers[0].series[0].offset = 4;
  const auto blobs = Open(0);
  const PlanReader reader(plan_, model_, *blobs);
  std::vector<std::byte> out(plan_.size());
  EXPECT_EQ(reader.Read(0, out).error().code, ErrorCode::kDataLoss);
  model_.atoms[0].source.gathers[0].series[0].offset = ~uint64_t{0} - 2;
  EXPECT_EQ(reader.Read(0, out).error().code, ErrorCode::kDataLoss);
}

TEST_F(ReaderFaults, ReservedSourcesAreRefused) {
  model_.atoms[0].source.kind = static_cast<SourceKind>(5);
  const auto blobs = Open(0);
  const PlanReader reader(plan_, model_, *blobs);
  std::vector<std::byte> out(plan_.size());
  EXPECT_EQ(reader.Read(0, out).error().code, ErrorCode::kUnsupported);
}

TEST_F(ReaderFaults, ExplainNamesFilesAndOffsets) {
  const auto blobs = Open(0);
  const PlanReader reader(plan_, model_, *blobs);
  const auto origins = *reader.Explain(60, plan_.size(), 10);
  ASSERT_EQ(origins.size(), 4u);
  EXPECT_EQ(origins[0].kind, Origin::Kind::kLiteral);
  EXPECT_EQ(origins[0].begin, 60u);
  EXPECT_EQ(origins[1].kind, Origin::Kind::kBlob);
  EXPECT_EQ(origins[1].begin, 64u);
  EXPECT_EQ(origins[1].end, 64 + kElements * 2);
  EXPECT_EQ(origins[1].blob, BlobIndex{0});
  EXPECT_EQ(origins[1].blob_length, kElements * 4);
  EXPECT_EQ(origins[1].stored, DType::kF32);
  EXPECT_EQ(origins[1].shown, DType::kBF16);
  EXPECT_EQ(origins[2].blob, BlobIndex{1});
  EXPECT_EQ(origins[3].kind, Origin::Kind::kZero);
  EXPECT_EQ(origins[3].end - origins[3].begin, 8u);
  EXPECT_EQ(reader.Explain(0, plan_.size(), 2)->size(), 2u);
  EXPECT_TRUE(reader.Explain(plan_.size(), 10, 2)->empty());
}

}  // namespace
}  // namespace ckptfs
