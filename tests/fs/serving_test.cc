// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/serving.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "core/blob/touched_files.h"
#include "fs/serve/page_pool.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using testing::TreeFixture;

TEST(ServingPolicyTest, ChoosesByWhatTheFileIs) {
  ServingQuestion question;
  question.size = 10 << 20;
  question.passthrough = question.materialise = true;
  question.budget = 100 << 20;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kMaterialise);
  question.whole_blob = true;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kDirect);
  question.size = kSmallFile - 1;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
  question = {};
  question.size = 200 << 20;
  question.passthrough = question.materialise = true;
  question.budget = 100 << 20;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
  question.size = 10 << 20;
  question.materialise = false;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
  question.materialise = true;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kMaterialise);
  question.read_once = true;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
  question.filled = true;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kMaterialise) << "it was warmed";
  question.read_once = question.filled = false;
  question.passthrough = false;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
  question.forced = ServingMode::kMaterialise;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kMaterialise);
  question.forced = ServingMode::kDirect;
  EXPECT_EQ(ChooseServing(question).mode, ServingMode::kStream);
}

// A mount with passthrough; skips where there is no huge-page tmpfs.
class PassthroughTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto pool = PagePool::Create(kHugePage); !pool) GTEST_SKIP() << pool.error().message;
    t_.AddStep("r", "s", 1, 5);
  }
  Filesystem& Mount(uint64_t budget = 64 * kHugePage) {
    FilesystemOptions options;
    options.passthrough = true;
    options.materialise_budget = budget;
    return t_.Mount(std::move(options));
  }
  OpenFile Open(const std::string& path) {
    const auto file = t_.Walk(path).value();
    return t_.fs().Open(file.inode, O_RDONLY, {}).value();
  }
  // Returns the bytes that the kernel would read through the descriptor, to its end.
  static std::string BackingBytes(const OpenFile& open) {
    std::string bytes(lseek(open.backing_fd, 0, SEEK_END), '\0');
    EXPECT_EQ(pread(open.backing_fd, bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  static std::string Model(const char* layout, const char* path) {
    return TreeFixture::Expected(5, Layout::Parse(layout).value(), path);
  }
  nlohmann::json Status() { return nlohmann::json::parse(t_.fs().StatusJson()); }
  TreeFixture t_;
};

TEST_F(PassthroughTest, LargeFilesAreFilledOnceAndShared) {
  Mount();
  const OpenFile first = Open("/view/tp1/rank0/model.bin");
  ASSERT_EQ(first.mode, ServingMode::kMaterialise);
  EXPECT_FALSE(first.keep_cache) << "the kernel refuses it with passthrough";
  EXPECT_TRUE(BackingBytes(first) == Model("tp1", "rank0/model.bin"));
  const OpenFile second = Open("/view/tp1/rank0/model.bin");
  EXPECT_EQ(second.backing_token, first.backing_token);
  t_.fs().Release(first.handle);
  t_.fs().Release(second.handle);
  const OpenFile third = Open("/view/tp1/rank0/model.bin");
  EXPECT_TRUE(BackingBytes(third) == Model("tp1", "rank0/model.bin"));
  EXPECT_TRUE(*testing::ReadHandle(t_.fs(), third.handle) == Model("tp1", "rank0/model.bin"));
  t_.fs().Release(third.handle);
  EXPECT_EQ(Status()["materialised"]["fills"], 1);
  EXPECT_EQ(Status()["materialised"]["hits"], 1);
}

TEST_F(PassthroughTest, WholeSourceFilesAreDirectAndSmallOnesStreamed) {
  Mount();
  for (const char* path : {"/view/tp1/rank0/whole.bin", "/run/r/step/s/source/s/data.bin"}) {
    const OpenFile open = Open(path);
    ASSERT_EQ(open.mode, ServingMode::kDirect) << path;
    EXPECT_TRUE(BackingBytes(open) == TreeFixture::SourceBytes(5));
    t_.fs().Release(open.handle);
  }
  const OpenFile small = Open("/view/tp1/rank0/small.json");
  EXPECT_EQ(small.mode, ServingMode::kStream);
  EXPECT_EQ(small.backing_fd, -1);
  EXPECT_TRUE(small.keep_cache);
  t_.fs().Release(small.handle);
}

TEST_F(PassthroughTest, OpensOfOneInodeNeverMix) {
  Mount(3 * kHugePage);  // room for one file
  // The first is streamed for want of room; the next must be, too.
  const OpenFile fill1 = Open("/view/tp1/rank0/model.bin");
  ASSERT_EQ(fill1.mode, ServingMode::kMaterialise);
  const OpenFile streamed = Open("/view/dp2/rank1/model.bin");
  ASSERT_EQ(streamed.mode, ServingMode::kStream);
  t_.fs().Release(fill1.handle);
  const OpenFile beside = Open("/view/dp2/rank1/model.bin");
  EXPECT_EQ(beside.mode, ServingMode::kStream) << "the kernel would answer EIO";
  t_.fs().Release(streamed.handle);
  t_.fs().Release(beside.handle);
  const OpenFile now = Open("/view/dp2/rank1/model.bin");
  EXPECT_EQ(now.mode, ServingMode::kMaterialise);
  t_.fs().Release(now.handle);
}

TEST_F(PassthroughTest, EvictionSparesWhatIsMapped) {
  Mount(3 * kHugePage);  // room for one file
  const OpenFile open = Open("/view/tp1/rank0/model.bin");
  const std::string path = "/proc/self/fd/" + std::to_string(open.backing_fd);
  const int reader = ::open(path.c_str(), O_RDONLY);  // as passthrough opens it
  const std::string expected = Model("tp1", "rank0/model.bin");
  void* mapped = mmap(nullptr, expected.size(), PROT_READ, MAP_SHARED, reader, 0);
  close(reader);
  t_.fs().Release(open.handle);
  const OpenFile other = Open("/view/dp2/rank0/model.bin");
  EXPECT_EQ(other.mode, ServingMode::kStream) << "the mapped pages may not be used again";
  t_.fs().Release(other.handle);
  EXPECT_TRUE(std::string_view(static_cast<char*>(mapped), expected.size()) == expected);
  munmap(mapped, expected.size());
  const OpenFile after = Open("/view/dp2/rank0/model.bin");
  EXPECT_EQ(after.mode, ServingMode::kMaterialise);
  EXPECT_TRUE(BackingBytes(after) == Model("dp2", "rank0/model.bin"));
  t_.fs().Release(after.handle);
  EXPECT_EQ(Status()["materialised"]["evictions"], 1);
}

TEST_F(PassthroughTest, PagesInAPipeOutliveTheEviction) {
  Mount(2 * kHugePage);  // room for one file
  const OpenFile open = Open("/view/tp1/rank0/model.bin");
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  loff_t offset = 8192;
  const ssize_t count = splice(open.backing_fd, &offset, pipe_ends[1], nullptr, 32768, 0);
  ASSERT_GT(count, 0);
  t_.fs().Release(open.handle);
  const OpenFile other = Open("/view/tp2/rank1/model.bin");
  EXPECT_EQ(other.mode, ServingMode::kMaterialise);
  std::string bytes(static_cast<size_t>(count), '\0');
  EXPECT_EQ(read(pipe_ends[0], bytes.data(), bytes.size()), count);
  const std::string before = Model("tp1", "rank0/model.bin").substr(8192, bytes.size());
  ASSERT_NE(before, Model("tp2", "rank1/model.bin").substr(8192, bytes.size()));
  EXPECT_TRUE(bytes == before);
  t_.fs().Release(other.handle);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

// The same of a file that is streamed: its reader is told at its end, if not before.
TEST(StreamTest, ASourceThatMovesInTheMiddleOfAStream) {
  const std::string truth = TreeFixture::Expected(5, Layout{}, "rank0/model.bin");
  for (const testing::Accident& accident : testing::Accidents()) {
    SCOPED_TRACE(accident.name);
    TreeFixture t;
    t.WriteOldSource("r", "s", 5);
    t.AddStep("r", "s", 1, 5);
    FilesystemOptions options;
    options.touched = std::make_shared<TouchedFiles>(TouchedFiles::Options{});
    Filesystem& fs = t.Mount(std::move(options));
    const OpenFile open =
        fs.Open(t.Walk("/view/tp1/rank0/model.bin").value().inode, O_RDONLY, {}).value();
    ASSERT_EQ(open.mode, ServingMode::kStream);
    std::string bytes(truth.size(), '?');
    const auto out = std::as_writable_bytes(std::span(bytes));
    const size_t half = bytes.size() / 2;
    ASSERT_EQ(fs.Read(open.handle, 0, out.first(half)).value(), half);
    accident.happen(t.SourcePath("r", "s"));
    const auto rest = fs.Read(open.handle, half, out.subspan(half));
    EXPECT_EQ(rest.has_value(), accident.same);
    EXPECT_TRUE(!rest || bytes == truth);
  }
}

TEST_F(PassthroughTest, AFillFromASourceThatChangedMeanwhileFails) {
  Mount();
  // Checked now, and by the interval not again when the next file is filled.
  t_.fs().Release(Open("/view/tp1/rank0/model.bin").handle);
  std::fstream(t_.SourcePath("r", "s"), std::ios::in | std::ios::out | std::ios::binary) << "new";
  const auto file = t_.Walk("/view/dp2/rank0/model.bin").value();
  EXPECT_EQ(t_.fs().Open(file.inode, O_RDONLY, {}).error().code, ErrorCode::kStale);
}

TEST_F(PassthroughTest, FilledFilesAreCheckedAgainstTheirSourceAtOpen) {
  Mount();
  t_.fs().Release(Open("/view/tp1/rank0/model.bin").handle);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // the interval of checks
  std::ofstream(t_.SourcePath("r", "s"), std::ios::app) << "x";
  const auto file = t_.Walk("/view/tp1/rank0/model.bin").value();
  EXPECT_EQ(t_.fs().Open(file.inode, O_RDONLY, {}).error().code, ErrorCode::kStale);
  const auto whole = t_.Walk("/view/tp1/rank0/whole.bin").value();
  EXPECT_EQ(t_.fs().Open(whole.inode, O_RDONLY, {}).error().code, ErrorCode::kStale);
}

TEST_F(PassthroughTest, RefusedBackingsAreStreamed) {
  Mount();
  const OpenFile open = Open("/view/tp1/rank0/model.bin");
  const OpenFile again = t_.fs().Degrade(open.handle).value();
  EXPECT_EQ(again.mode, ServingMode::kStream);
  EXPECT_EQ(again.backing_fd, -1);
  EXPECT_TRUE(*testing::ReadHandle(t_.fs(), again.handle) == Model("tp1", "rank0/model.bin"));
  EXPECT_EQ(Open("/view/tp1/rank0/model.bin").mode, ServingMode::kStream);
  t_.fs().DisablePassthrough("the kernel said no");
  EXPECT_EQ(Open("/view/dp2/rank0/model.bin").mode, ServingMode::kStream);
  EXPECT_THAT(t_.Log(), ::testing::Contains(HasSubstr("the kernel said no")));
}

TEST_F(PassthroughTest, WarmFillsBeforeTheOpen) {
  Mount();
  EXPECT_EQ(t_.fs().Warm("tp1", "rank0").value().bytes, 2 * kHugePage) << "2 MiB and a head";
  const OpenFile open = Open("/view/tp1/rank0/model.bin");
  EXPECT_EQ(Status()["materialised"]["hits"], 1);
  t_.fs().Release(open.handle);
  EXPECT_EQ(t_.fs().Warm("r/s/dp2", "").value().bytes, 4 * kHugePage);
  EXPECT_EQ(t_.fs().Warm("dp64", "").error().code, ErrorCode::kExhausted);
  const auto latest = t_.fs().Warm("r/latest/dp2", "").value();
  EXPECT_EQ(latest.files, 2u);
  EXPECT_THAT(latest.skipped, ::testing::Contains(::testing::Key("stream: small file")));
  const auto refused = t_.fs().Warm("tp32", "");
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(refused.error().message, HasSubstr("no format can show layout tp32; "));
  EXPECT_EQ(t_.fs().Warm("r/s/bogus", "").error().code, ErrorCode::kInvalid);
  EXPECT_EQ(t_.fs().Warm("r/none/tp1", "").error().code, ErrorCode::kNotFound);
}

TEST_F(PassthroughTest, ConcurrentOpensFillOnce) {
  Mount();
  const auto file = t_.Walk("/view/tp1/rank0/model.bin").value();
  const std::string expected = Model("tp1", "rank0/model.bin");
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const OpenFile open = t_.fs().Open(file.inode, O_RDONLY, {}).value();
      EXPECT_EQ(open.mode, ServingMode::kMaterialise);
      EXPECT_TRUE(BackingBytes(open) == expected);
      t_.fs().Release(open.handle);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Status()["materialised"]["fills"], 1);
}

TEST_F(PassthroughTest, RemovedStepsFilesGoOnAndAreTheFirstToGo) {
  Mount();
  const OpenFile open = Open("/view/tp1/rank0/model.bin");
  const auto records = t_.store().Steps("r").value();
  ASSERT_TRUE(t_.store().Remove(records.front()));
  ASSERT_TRUE(t_.fs().Refresh());
  EXPECT_TRUE(BackingBytes(open) == Model("tp1", "rank0/model.bin"));
  t_.fs().Release(open.handle);
}

TEST_F(PassthroughTest, MaterialiseCanBeForcedWithoutPassthrough) {
  FilesystemOptions options;
  options.force_mode = ServingMode::kMaterialise;
  options.materialise_budget = 16 * kHugePage;
  t_.Mount(std::move(options));
  const OpenFile open = Open("/view/tp2/rank1/model.bin");
  EXPECT_EQ(open.mode, ServingMode::kMaterialise);
  EXPECT_EQ(open.backing_fd, -1);
  EXPECT_TRUE(*testing::ReadHandle(t_.fs(), open.handle, 12'345) ==
              Model("tp2", "rank1/model.bin"));
  t_.fs().Release(open.handle);
}

TEST(ServingPolicyTest, LargeFilesThatAreCopiedAreReadByCopy) {
  EXPECT_TRUE(ReadByCopy(Reading::kCopied, kSmallFile));
  EXPECT_TRUE(ReadByCopy(Reading::kOnce, kSmallFile));
  EXPECT_FALSE(ReadByCopy(Reading::kCopied, kSmallFile - 1));
  EXPECT_FALSE(ReadByCopy(Reading::kMapped, 100 << 20));
  EXPECT_FALSE(ReadByCopy(Reading::kRandom, 100 << 20));
}

}  // namespace
}  // namespace ckptfs
